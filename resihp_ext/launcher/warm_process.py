"""The launcher's side of the warm process: starts it, asks it for workers, starts it anew.

The other side, in the training script, is ``warm.py``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from resihp_ext.launcher.warm import MESSAGE_BYTES, WARM

logger = logging.getLogger(__name__)

NICEST = 19
STARTS = 4
"""How often in all it is started; what dies again and again costs more than it saves."""
PAUSE_S = 5.0
"""Before it is started anew: what killed it, often a lack of memory, may pass."""
END_S = 2.0


class State(StrEnum):
    """What the warm process is doing."""

    NONE = "none"
    IMPORTING = "importing"
    READY = "ready"
    FORKING = "forking"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A worker to be forked."""

    env: Mapping[str, str]
    cpus: Sequence[int]
    """Processors it may use; all that the warm process may when empty."""
    outputs: tuple[str, str]
    """Files for stdout and stderr; empty for the launcher's own."""


class WarmProcess:
    """One process a node that has the script's imports done; used by one thread."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        self.state = State.NONE
        self._command = list(command)
        self._env = dict(env)
        self._log = log
        self._nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._niced = _can_get_back_from(NICEST)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._starts = 0
        self._not_before_s = 0.0
        self.refuses = ""
        """Why it is not started any more."""

    @property
    def descriptor(self) -> int | None:
        """Can be read when it has something to say; None when it does not run."""
        return None if self._socket is None else self._socket.fileno()

    def wait(self, timeout_s: float) -> int | None:
        """Blocks until it has said something, and takes that as :meth:`read` does."""
        if self._socket is None:
            return None
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return self.read() if poll.poll(timeout_s * 1000) else None

    def start_if_due(self, *, nice: bool = True) -> int | None:
        """Starts it unless it runs, has just died, or does so too often.

        Args:
            nice: Whether others work beside it that it must not hold up.

        Returns:
            The descriptor that can be read when it has something to say; None when not started.
        """
        if self.state is not State.NONE or self.refuses or time.monotonic() < self._not_before_s:
            return None
        self._starts += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with theirs, self._log.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._env | {WARM: str(theirs.fileno())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        if nice and self._niced:
            # Importing must not take processor time from the training beside it.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, NICEST)
        self._socket, self.state = ours, State.IMPORTING
        return ours.fileno()

    def ask(self, wanted: Wanted) -> bool:
        """Asks for a worker; False when it cannot give one now. Never blocks."""
        if self.state is not State.READY or self._socket is None:
            return False
        request = {"env": dict(wanted.env), "cpus": list(wanted.cpus), "nice": self._nice}
        with contextlib.ExitStack() as opened:
            descriptors = [
                opened.enter_context(Path(path).open("a")).fileno() if path else own
                for path, own in zip(wanted.outputs, (1, 2), strict=True)
            ]
            try:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            except OSError:
                self.died()
                return False
        self.state = State.FORKING
        return True

    def read(self) -> int | None:
        """What it has to say; the pid of a new worker if it is that.

        Call it when the descriptor can be read; afterwards :attr:`state` is up to date.
        """
        assert self._socket is not None
        try:
            raw = self._socket.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return None
        except OSError:
            raw = b""
        said: dict[str, Any] = json.loads(raw) if raw else {}
        if "pid" in said:
            self.state = State.READY
            return int(said["pid"])
        if "threads" in said:
            self.state = State.READY
            if said["threads"]:
                logger.warning(
                    "imports of the script have started threads, and a fork copies none: %s",
                    ", ".join(said["threads"]),
                )
            return None
        self.refuses = str(said.get("refuses", ""))
        self.died()
        return None

    def died(self) -> None:
        """It is gone, or is to go: forgets it; :meth:`start_if_due` may start another."""
        self.close()
        self._not_before_s = time.monotonic() + PAUSE_S
        if not self.refuses and self._starts >= STARTS:
            self.refuses = f"it has died {STARTS} times, see {self._log}"
        if self.refuses:
            logger.warning("new workers start cold: the warm process: %s", self.refuses)

    def close(self) -> None:
        """Ends it."""
        self.state = State.NONE
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_S)
            self._process = None


def _can_get_back_from(nice: int) -> bool:
    """Whether the system lets this user raise a priority again; tried on a thread of its own.

    Linux keeps priorities by thread, and gives them to what the thread starts.
    """
    found = []

    def attempt() -> None:
        before = os.getpriority(os.PRIO_PROCESS, 0)
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            os.setpriority(os.PRIO_PROCESS, 0, before)
        except OSError:
            return
        found.append(True)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return bool(found)
