"""What only the agent does that hosts a job's coordinator, and how agents are named and found.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from resihp_ext.control.ask import FILE, Address, Invitation, write_address, write_token
from resihp_ext.control.frames import TOKEN_BYTES
from resihp_ext.errors import UserError

TOKEN = "RESIHP_TOKEN"
"""Environment: the job's token in hexadecimal; of the launcher, if the operator hands it out, and
of every worker."""

TOKEN_FILE = "coordinator.token"
NODES_PER_HOST = 64
ELSEWHERE = "192.0.2.1"
"""An address that no host has (RFC 5737): the way to it shows the interface for others."""


def given_token(token_file: str | None, environ: dict[str, str]) -> bytes | None:
    """The token that the operator hands out, if there is one.

    Raises:
        UserError: it cannot be read, or is no token.
    """
    text, where = environ.get(TOKEN, ""), f"environment variable {TOKEN}"
    if token_file is not None:
        where = f"--control-token-file {token_file}"
        try:
            text = Path(token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"resihp-run: {where}: {error}") from None
    if not text:
        return None
    try:
        token = bytes.fromhex(text)
    except ValueError:
        token = b""
    if len(token) != TOKEN_BYTES:
        raise UserError(
            f"resihp-run: {where}: needs {2 * TOKEN_BYTES} hexadecimal digits, "
            "as `openssl rand -hex 32` gives them"
        )
    return token


def own_address(endpoint_host: str, local_addr: str | None) -> str:
    """The address of this host at which the nodes of a job can reach it."""
    if local_addr:
        return socket.gethostbyname(local_addr)
    for target in (endpoint_host or "localhost", ELSEWHERE):
        if target == "localhost":
            return "127.0.0.1"
        with contextlib.suppress(OSError):
            address = _interface_towards(target)
            # A host's own name often stands for a loopback address in its /etc/hosts.
            if not address.startswith("127.") or target.startswith("127."):
                return address
    return "127.0.0.1"


def _interface_towards(target: str) -> str:
    family, kind, protocol, _, where = socket.getaddrinfo(target, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)  # sends nothing
        return str(probe.getsockname()[0])


class NodeName:
    """The host's name; with a number where several agents of one job share a host.

    The same agent started once more gets the same name, so that it gets its ranks back. Held by
    a socket in Linux's abstract namespace, which goes with the process whatever ends it.
    """

    def __init__(self, run_id: str) -> None:
        host = socket.gethostname()[:56]
        job = hashlib.sha256(f"{run_id} {os.getuid()}".encode()).hexdigest()[:16]
        for number in range(NODES_PER_HOST):
            self._held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                self._held.bind(f"\0resihp/{job}/{number}")
            except OSError:
                self._held.close()
                continue
            self.text = f"{host}.{number}" if number else host
            return
        raise UserError(f"resihp-run: {NODES_PER_HOST} agents of this job run on {host} already")

    def close(self) -> None:
        self._held.close()


def resilience_dir(script_args: Sequence[str]) -> Path | None:
    """Where the job keeps its records, as far as its command line says so."""
    chosen = _value(script_args, "--resilience-dir")
    if chosen:
        return Path(chosen)
    save = _value(script_args, "--save")
    if save:
        return Path(save).parent / "resilience"
    return Path("resilience") if "--resilience" in script_args else None


def _value(words: Sequence[str], flag: str) -> str:
    value = ""
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == flag:
            value = following
        elif word.startswith(f"{flag}="):
            value = word.removeprefix(f"{flag}=")
    return value


class AddressFile:
    """``coordinator.json`` and the token beside it: how ``resihp status`` finds the job."""

    def __init__(self, folder: Path, node: str = "", invitation: Invitation | None = None) -> None:
        self._folder = folder
        self._node, self._invitation = node, invitation or Invitation()
        self._token = folder / TOKEN_FILE

    def write(self, where: tuple[str, int], token: bytes) -> None:
        """Both can be read by the job's owner only.

        Raises:
            OSError: they cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        write_token(self._token, token)
        host, port = where
        file = str(self._token.absolute())
        found = Address(
            address=host,
            port=port,
            token_file=file,
            node=self._node,
            host=socket.gethostname(),
            invitation=self._invitation,
        )
        write_address(self._folder, found)

    def remove(self) -> None:
        """The job is over."""
        for path in (self._folder / FILE, self._token):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
