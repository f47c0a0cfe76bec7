"""Signals that ask the run to stop, turned into one exception so that everything is cleaned up.

Promise: SIGTERM, SIGINT and SIGHUP raise :class:`Stopped` once; later ones are ignored while the
clean-up runs; a stop that some library swallowed is raised again by :meth:`StopRequest.check`.
"""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


class Stopped(BaseException):
    """The run was asked to stop. Not an ``Exception``: no library may take it for a failure."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopRequest:
    """Remembers the signal that asked to stop."""

    def __init__(self) -> None:
        self._signum: int | None = None
        self._is_held = False

    def handle(self, signum: int, _frame: FrameType | None) -> None:
        """Raise at the first signal; ignore the following, clean-up must not be interrupted."""
        if self._signum is None:
            self._signum = signum
            if not self._is_held:
                raise Stopped(signum)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within the block a signal is only remembered: for what must happen wholly or not at all.

        Masking signals would not do here: one that arrives on a thread of torch's is still handled.
        """
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    def check(self) -> None:
        """Raise :class:`Stopped` if a signal came, even if its exception was swallowed."""
        if self._signum is not None:
            raise Stopped(self._signum)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Within the block, stop signals raise :class:`Stopped` in the main thread."""
    request = StopRequest()
    previous = {stop: signal.signal(stop, request.handle) for stop in STOP_SIGNALS}
    try:
        yield request
    finally:
        for stop, handler in previous.items():
            signal.signal(stop, handler)


@contextmanager
def signals_held() -> Iterator[None]:
    """Within the block, stop signals wait, also in a process that is forked meanwhile."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)
