"""Two nodes on one machine, with a network between them that can be cut.

Each node is a network namespace with a host name of its own; one pair of virtual interfaces joins
them. Needs root, ``ip`` and ``unshare``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import TracebackType
from typing import Self

INTERFACE = "eth0"
PORT = 29400
_ADDRESSES = ("10.231.77.1", "10.231.77.2")
_LIMIT_S = 20.0


class Network:
    """Used by ``with``; at its end the namespaces are gone."""

    def __init__(self, names: tuple[str, str]) -> None:
        self._names = names
        self._spaces = [f"chaos{os.getpid()}-{name}" for name in names]

    def __enter__(self) -> Self:
        try:
            for space in self._spaces:
                _ip("netns", "add", space)
            first, second = self._spaces
            peer = ("peer", "name", INTERFACE, "netns", second)
            _ip("link", "add", INTERFACE, "netns", first, "type", "veth", *peer)
            for space, address in zip(self._spaces, _ADDRESSES, strict=True):
                _ip("-n", space, "address", "add", f"{address}/24", "dev", INTERFACE)
                for interface in ("lo", INTERFACE):
                    _ip("-n", space, "link", "set", interface, "up")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Removes the namespaces; what runs in them keeps a network without a way out."""
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)

    def inside(self, node: int) -> list[str]:
        """Words before a command that is to run on a node."""
        become = 'hostname "$0" && exec "$@"'
        space = ["ip", "netns", "exec", self._spaces[node], "unshare", "--uts"]
        return [*space, "sh", "-c", become, self._names[node]]

    def address(self, node: int) -> str:
        """Of a node."""
        return _ADDRESSES[node]

    def cut(self, name: str) -> None:
        """Takes a node's interface down."""
        space = self._spaces[self._names.index(name)]
        _ip("-n", space, "link", "set", INTERFACE, "down")


def can_separate() -> bool:
    """Whether namespaces can be made here."""
    if os.geteuid() or not all(map(shutil.which, ("ip", "unshare", "hostname"))):
        return False
    try:
        with Network(("n0", "n1")) as network:
            done = subprocess.run([*network.inside(0), "true"], timeout=_LIMIT_S, check=False)
            return done.returncode == 0
    except (subprocess.SubprocessError, OSError):
        return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=_LIMIT_S)
