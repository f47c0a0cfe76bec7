"""The process in which plans are computed: it answers one question after the other.

What is computed in advance is given up when a signal says that something is needed at once.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection

from resihp_ext.control.actions import NeedPlan
from resihp_ext.control.planning import Planned, plan_for

NICE = 5
"""Training comes first."""
HURRY = signal.SIGUSR1
PR_SET_PDEATHSIG = 1
"""From ``linux/prctl.h``."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the process is asked."""

    number: int
    need: NeedPlan
    urgent: bool
    """Otherwise it may be given up."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What it says: the number of the question, and the answer unless it was given up."""

    number: int
    planned: Planned | None
    error: str = ""


class _GivenUp(BaseException):
    """No error: what was computed is not wanted any more."""


class _Hurry:
    """Turns the signal into an exception, while that is wanted."""

    def __init__(self) -> None:
        self.listens = False
        signal.signal(HURRY, self._heard)

    def _heard(self, _signum: int, _frame: object) -> None:
        if self.listens:
            self.listens = False
            raise _GivenUp


def serve(connection: Connection) -> None:
    """Answers until the other side is gone."""
    hurry = _Hurry()
    connection.send(Reply(-1, None))
    while True:
        question: Question = connection.recv()
        connection.send(_answer(question, hurry))


def _answer(question: Question, hurry: _Hurry) -> Reply:
    try:
        hurry.listens = not question.urgent
        planned = plan_for(question.need)
        hurry.listens = False
        return Reply(question.number, planned)
    except _GivenUp:
        return Reply(question.number, None)
    except Exception as error:
        hurry.listens = False
        logging.getLogger(__name__).exception("a plan could not be computed")
        return Reply(question.number, None, repr(error))


def main() -> None:
    """Entry point; the argument is the number of the socket."""
    # Ctrl-C is for the launcher, which ends this process when it ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(EOFError, OSError):
        serve(Connection(int(sys.argv[1])))
