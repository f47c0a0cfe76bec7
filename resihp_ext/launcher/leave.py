"""How the process of a launcher ends: with the exit code that was meant, whatever threads are left.

torch's rendezvous keeps a thread that asks its store again and again, also behind a signal. When it
comes back from the store into an interpreter that is going down, Python 3.12 ends it inside of C++
code that lets nothing through, and the process aborts with 134: a job that was to be requeued (75)
would not be.
"""

from __future__ import annotations

import atexit
import os
import sys
from contextlib import suppress
from typing import NoReturn


def leave(exit_code: int) -> NoReturn:
    """Ends the process: what was registered for its end is done, threads are not waited for."""
    try:
        atexit._run_exitfuncs()  # logs, temporary files, helpers of multiprocessing
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # whoever read it may be gone
                stream.flush()
        os._exit(exit_code)
