"""Starts the launchers of one job, watches it, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_MARK = "RESIHP_CHAOS"
_POLL_S = 0.05
_SETTLE_S = 8.0
"""For helpers to end after their launcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One launcher."""

    words: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a job has ended."""

    exit_codes: tuple[int, ...]
    """One a launcher; negative for a signal."""
    timed_out: bool
    leftovers: tuple[str, ...]
    """Processes of the job that outlived its launchers."""
    wall_s: float


class Processes:
    """The launchers of one job and everything below them; used by ``with``."""

    def __init__(self, commands: Sequence[Command], *, tree: Path, gap_s: float = 0.0) -> None:
        """Starts them, one after the other.

        Args:
            tree: Where the program lies that is to run.
            gap_s: Between two starts.
        """
        self.mark = f"{_MARK}={uuid.uuid4()}"
        self._running: list[subprocess.Popen[bytes]] = []
        self._tree = tree
        self._started_s = time.monotonic()
        try:
            for command in commands:
                if self._running:
                    time.sleep(gap_s)
                self._running.append(self._start(command))
        except BaseException:
            self.end()
            raise

    def _start(self, command: Command) -> subprocess.Popen[bytes]:
        name, _, value = self.mark.partition("=")
        own = {name: value, "PYTHONPATH": str(self._tree)}
        speed = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
        with command.log.open("wb") as log:
            return subprocess.Popen(
                command.words,
                cwd=self._tree,
                env={**os.environ, **speed, **own, **command.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.end()

    def wait(
        self,
        limit_s: float,
        look: Callable[[], None] = lambda: None,
        until: Callable[[], bool] = lambda: False,
    ) -> Ended:
        """Waits until all launchers have ended, or the time is over, or no more is wanted.

        Args:
            look: Called every moment.
        """
        until_s = self._started_s + limit_s
        while any(one.poll() is None for one in self._running) and time.monotonic() < until_s:
            if until():
                break
            look()
            time.sleep(_POLL_S)
        look()
        timed_out = any(one.poll() is None for one in self._running)
        wall_s = time.monotonic() - self._started_s
        left = [] if timed_out else self._left()
        self.end()
        codes = tuple(-1 if one.returncode is None else one.returncode for one in self._running)
        return Ended(exit_codes=codes, timed_out=timed_out, leftovers=tuple(left), wall_s=wall_s)

    def _left(self) -> list[str]:
        until_s = time.monotonic() + _SETTLE_S
        while (found := self.pids()) and time.monotonic() < until_s:
            time.sleep(_POLL_S)
        return [f"{pid} {_command_line(pid)}" for pid in found]

    def pids(self) -> list[int]:
        """Every process of the job: all inherit its mark."""
        return [pid for pid in _all_pids() if self.mark.encode() in _environment(pid)]

    @property
    def launcher_pid(self) -> int:
        """Of the first launcher."""
        return self._running[0].pid

    def end(self) -> None:
        """Ends whatever still runs of this job."""
        until_s = time.monotonic() + _SETTLE_S
        while (found := self.pids()) and time.monotonic() < until_s:
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            for one in self._running:
                one.poll()
            time.sleep(_POLL_S)
        for one in self._running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.wait(_SETTLE_S)


def variable(pid: int, name: str) -> str | None:
    """A variable of a process's environment, as it was when the process started."""
    start = f"{name}=".encode()
    found = next((one for one in _environment(pid) if one.startswith(start)), None)
    return None if found is None else found[len(start) :].decode()


def children_of(pid: int) -> list[int]:
    """Processes that a process has started, or adopted, and that have not ended."""
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(one) for one in path.read_text().split()]
    return sorted(found)


def busy_s(pid: int) -> float:
    """Processor time of a process so far; 0 when there is none."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _all_pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _environment(pid: int) -> list[bytes]:
    # Empty for a process that has ended and waits to be reaped.
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _command_line(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return ""
    return words.decode(errors="replace")[:120]
