"""Where a worker hangs that was told to stop what it does, on its standard error.

By a thread of Python that holds the interpreter while it reads the others' stacks. The C library's
watchdog of ``faulthandler`` does not: it may read a stack that changes under it, and ends a healthy
process by SIGSEGV (a busy one within seconds, when it dumps all the time).
"""

from __future__ import annotations

import faulthandler
import threading

STANDARD_ERROR = 2
"""Its descriptor."""


class Stacks:
    """Writes the stacks of all threads, unless it is called off in time."""

    def __init__(self, after_s: float) -> None:
        """Prepares it.

        Args:
            after_s: From :meth:`begin` on.
        """
        self._after_s = after_s
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        """From now on; what began before is called off."""
        self.end()
        self._timer = threading.Timer(self._after_s, _write)
        self._timer.name, self._timer.daemon = "stacks", True
        self._timer.start()

    def end(self) -> None:
        """The worker goes on."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


def _write() -> None:
    # What stands in sys.stderr may wait for a lock that the hanging thread holds.
    faulthandler.dump_traceback(file=STANDARD_ERROR)
