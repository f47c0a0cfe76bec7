"""New processes for places whose first one has died, in a form that torch's agent can end.

torch's ``SubprocessContext`` keeps one handler a place. A replacement is put there instead of the
dead one, so that everything of torch's that ends workers finds it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

UNKNOWN_EXIT_CODE = 255
"""Of a process that somebody else has reaped."""

POLL_INTERVAL_S = 0.01


class AdoptedProcess:
    """What of ``subprocess.Popen`` torch needs, for a child that this process did not start."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                self.returncode = UNKNOWN_EXIT_CODE
            else:
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Blocks until it has ended.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        deadline_s = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() >= deadline_s:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
            time.sleep(POLL_INTERVAL_S)
        return code


class AdoptedHandler:
    """Stands for a worker that the warm process has forked."""

    def __init__(self, pid: int) -> None:
        self.proc = AdoptedProcess(pid)

    def close(self, death_sig: signal.Signals | None = None) -> None:
        """Sends a signal to the worker and what it started."""
        signal_group(self.proc.pid, death_sig or signal.SIGTERM)


class AppendingHandler(SubprocessHandler):
    """Starts a worker as torch does, but what its predecessor has written stays in the log."""

    def __init__(
        self,
        *,
        entrypoint: str,
        args: tuple[Any, ...],
        env: dict[str, str],
        outputs: tuple[str, str],
        local_rank: int,
        numa_options: Any,
    ) -> None:
        self._outputs = outputs
        super().__init__(entrypoint, args, env, None, None, local_rank, numa_options)

    def _popen(self, args: tuple[Any, ...], env: dict[str, str]) -> subprocess.Popen[bytes]:
        out, err = self._outputs
        # Given to torch's own attributes: its ``close`` closes them.
        self._stdout = Path(out).open("a") if out else None  # noqa: SIM115
        self._stderr = Path(err).open("a") if err else None  # noqa: SIM115
        return super()._popen(args, env)


def signal_group(pid: int, signum: signal.Signals) -> None:
    """Signals a worker together with its helpers; a worker leads its own process group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)


def end_helpers(pid: int) -> None:
    """Kills what a dead worker has left in its process group, and reaps what was adopted."""
    signal_group(pid, signal.SIGKILL)
    reap_group(pid)


def reap_group(pid: int) -> None:
    """Reaps ended children of a worker's process group, the worker being reaped already."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-pid, os.WNOHANG)[0]:
            pass
