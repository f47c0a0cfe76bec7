"""No process outlives the launcher: the last resort when an orderly shutdown did not finish.

The elastic agent ends the workers that it knows. It does not know a worker that was being
started when the signal came, nor what a dead worker left behind (data loaders, checkpoint
writers). As *subreaper* the launcher inherits those, so they can be found and ended.

Linux only (``prctl``, ``/proc``); elsewhere both functions do nothing.
"""

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
"""From ``linux/prctl.h``."""

POLL_INTERVAL_S = 0.02


def adopt_orphans() -> bool:
    """Make this process the new parent of orphaned descendants; True when the system agreed."""
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def end_children(*, grace_s: float) -> list[int]:
    """End every remaining child: SIGTERM, then SIGKILL after ``grace_s``; return their pids.

    Blocks for at most about twice ``grace_s``: a process in uninterruptible sleep survives even
    SIGKILL and must not take the launcher with it.
    """
    ended: set[int] = set()
    for signum in (signal.SIGTERM, signal.SIGKILL):
        deadline_s = time.monotonic() + grace_s
        told: set[int] = set()
        while children := _living_children():
            # Ending one child can hand its own children to us: look again until none is left.
            for pid in children - told:
                _signal_group(pid, signum)
            told |= children
            if time.monotonic() >= deadline_s:
                break
            time.sleep(POLL_INTERVAL_S)
        ended |= told
        if not children:
            break
    return sorted(ended)


def _living_children() -> set[int]:
    own = os.getpid()
    children = set()
    for stat_file in Path("/proc").glob("[0-9]*/stat"):
        # A process may end between the listing and the reading.
        with contextlib.suppress(OSError):
            # The command name, in brackets, may hold spaces: split behind its closing bracket.
            state, parent = stat_file.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == own:
                pid = int(stat_file.parent.name)
                if state != "Z":
                    children.add(pid)
                else:
                    _reap(pid)
    return children


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _signal_group(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == os.getpgrp():
            os.kill(pid, signum)  # in the launcher's own group, which must live on
        else:
            os.killpg(os.getpgid(pid), signum)
