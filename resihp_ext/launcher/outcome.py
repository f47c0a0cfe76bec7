"""What the launcher says and returns when workers fail: pure rules over plain facts.

A user wants one line that names the culprit, not one traceback for each survivor that lost its
peer. A scheduler wants the exit code of the culprit: 2 for a usage error, ``128 + n`` for signal n.

Promise: pure; imports neither torch nor Megatron.
"""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from resihp_ext.errors import EXIT_USAGE

SIGNAL_EXIT_BASE = 128
"""Shells report death by signal n as 128 + n."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailure:
    """One worker process that ended with anything but success."""

    rank: int
    """Global rank."""
    pid: int
    exit_code: int
    """As ``subprocess`` reports it: negative for a signal."""
    time_s: float
    """When the failure was seen, seconds since the epoch; whole seconds are enough."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What the launcher prints (nothing when ``line`` is None) and returns."""

    exit_code: int
    line: str | None


def outcome_of(failures: Sequence[WorkerFailure], *, log_hint: str) -> Outcome:
    """Turn failures, in the order in which they were seen, into an exit code and one line.

    A usage error stays silent here: the worker has already printed its one line.

    Raises:
        ValueError: ``failures`` is empty.
    """
    culprit = culprit_of(failures)
    if culprit.exit_code == EXIT_USAGE:
        return Outcome(exit_code=EXIT_USAGE, line=None)
    others = len(failures) - 1
    fallout = f"; {others} other rank(s) ended with it" if others else ""
    return Outcome(
        exit_code=shell_exit_code(culprit.exit_code),
        line=f"rank {culprit.rank} (pid {culprit.pid}) {cause_of(culprit.exit_code)}"
        f"{fallout}; {log_hint}",
    )


def culprit_of(failures: Sequence[WorkerFailure]) -> WorkerFailure:
    """Pick the failure that caused the others.

    The earliest second wins. Within it a signal outranks a usage error, which outranks any other
    exit: survivors of either fail by losing their peer, never the other way round. SIGTERM ranks
    last, because it is what the launcher itself sends to the survivors, unless it came first.

    Raises:
        ValueError: ``failures`` is empty.
    """
    if not failures:
        raise ValueError("no failure to explain")
    sigterm_came_first = failures[0].exit_code == -signal.SIGTERM

    def weight(failure: WorkerFailure) -> tuple[int, int]:
        if failure.exit_code == -signal.SIGTERM:
            kind = 0 if sigterm_came_first else 3
        elif failure.exit_code < 0:
            kind = 0
        else:
            kind = 1 if failure.exit_code == EXIT_USAGE else 2
        return int(failure.time_s), kind

    return min(failures, key=weight)


def shell_exit_code(exit_code: int) -> int:
    """Map ``-n`` (killed by signal n) to ``128 + n``; other codes stay as they are."""
    return exit_code if exit_code >= 0 else SIGNAL_EXIT_BASE - exit_code


def cause_of(exit_code: int) -> str:
    """What happened to a process, as the end of a sentence about it."""
    if exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:  # real-time signals have numbers without names
        name = "unnamed"
    return f"was killed by signal {-exit_code} ({name})"
