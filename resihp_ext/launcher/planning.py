"""The planner in a process of its own: it computes for seconds, and the coordinator must answer.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import signal
import sys
from concurrent.futures import Future, ProcessPoolExecutor

from resihp_ext.control.actions import NeedPlan
from resihp_ext.control.server import Planned

PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``."""


class PlannerProcess:
    """Called with what is needed; the answer comes later. Started by the first call."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __call__(self, need: NeedPlan) -> Future[Planned]:
        return self._started().submit(_answer, need)

    def start(self) -> None:
        """Does the imports now, so that the first plan need not wait for them."""
        self._started().submit(_load)

    def _started(self) -> ProcessPoolExecutor:
        if self._pool is None:
            # Not forked: the launcher has threads.
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, context, initializer=_initialise)
        return self._pool

    def close(self) -> None:
        """Ends the process, whatever it computes."""
        if self._pool is None:
            return
        running = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
        for one in running:
            one.kill()
        self._pool = None


def _initialise() -> None:
    # Ctrl-C is for the launcher, which ends this process by closing its pool.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _load() -> None:
    from resihp_ext.control import problem  # noqa: F401


def _answer(need: NeedPlan) -> Planned:
    from resihp_ext.control.problem import answer  # the launcher does without these imports

    return answer(need)
