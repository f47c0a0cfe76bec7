"""Makes a process slow by others that compete with it for one core.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import math
import os
import subprocess
import sys
from pathlib import Path

_STEP = 1.25
"""A unit of niceness is worth this factor of time: Linux's scheduler."""
_NICEST = 19
_BURN = """
import ctypes, os, signal, sys
parent, niceness, core = map(int, sys.argv[1:])
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with the parent
if os.getppid() != parent:
    sys.exit()
os.sched_setaffinity(0, {core})
os.nice(niceness)
while True:
    pass
"""


class CpuLoad:
    """A brake: this process and burners share a core, by weight."""

    def __init__(self, place: int = 0) -> None:
        """Prepares it.

        Args:
            place: Of this process on its machine: processes take the cores in turn.
        """
        self._place = place
        self._burners: list[subprocess.Popen[bytes]] = []
        self._cores: set[int] | None = None

    def keep(self, left: float) -> None:
        """See :class:`resihp_ext.brake.brake.Brake`."""
        self._end_burners()
        if left >= 1:
            if self._cores is not None:
                _pin(self._cores)
                self._cores = None
            return
        if self._cores is None:
            self._cores = os.sched_getaffinity(0)
        core = sorted(self._cores)[self._place % len(self._cores)]
        _pin({core})
        for niceness in burners(left):
            words = [str(os.getpid()), str(niceness), str(core)]
            self._burners.append(
                subprocess.Popen(
                    [sys.executable, "-I", "-S", "-c", _BURN, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                )
            )

    def _end_burners(self) -> None:
        for one in self._burners:
            one.kill()
        for one in self._burners:
            one.wait()
        self._burners.clear()


def burners(left: float) -> list[int]:
    """Niceness of each burner beside which a process keeps about this part of a core.

    Within 6 % of ``left``: niceness comes in steps of 25 %.
    """
    weight = (1 - left) / left
    whole = int(weight)
    rest = weight - whole
    found = [0] * whole
    if rest > 0:
        niceness = round(-math.log(rest) / math.log(_STEP))
        if niceness <= _NICEST:
            found.append(niceness)
        elif not found:
            found.append(_NICEST)
    return found


def why_not() -> str | None:
    """Why this machine cannot do it; None when it can."""
    return None if hasattr(os, "sched_setaffinity") else "processes cannot be bound to cores here"


def _pin(cores: set[int]) -> None:
    """Binds all threads of this process, since affinity is a thread's."""
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
