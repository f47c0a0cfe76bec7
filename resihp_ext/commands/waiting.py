"""Looks at a job until a node has done what it was asked to, and tells what it sees change."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from resihp_ext.commands.job import OVER, JobOverError, LateError
from resihp_ext.errors import ResiHPError

LOOK_S = 0.25

Status = Mapping[str, Any]
Say = Callable[[str], None]


class Job(Protocol):
    """What is needed of ``job.RunningJob``."""

    def status(self) -> dict[str, Any]: ...


class Goal(Protocol):
    """What is waited for, of one node."""

    def reached(self, node: Status, status: Status) -> str:
        """What to say when it is; nothing before.

        Raises:
            ResiHPError: it never will be.
        """

    def progress(self, node: Status, status: Status) -> str:
        """How far it is: a sentence."""


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to wait, and what that is measured with."""

    wait_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def node_of(status: Status, name: str) -> Status:
    """A node that was there a moment ago.

    Raises:
        JobOverError: the job ends.
        ResiHPError: the node is gone.
    """
    check_goes_on(status)
    found: Status | None = status["nodes"].get(name)
    if found is None:
        raise ResiHPError(f"node {name} is no longer in the job")
    return found


def check_goes_on(status: Status) -> None:
    """Nothing can be asked of a job that ends.

    Raises:
        JobOverError: it does.
    """
    if status["phase"] in OVER:
        cause = f": {status['cause']}" if status["cause"] else ""
        raise JobOverError(f"the job ends{cause}")


def wait_for(job: Job, name: str, goal: Goal, patience: Patience, say: Say) -> None:
    """Returns once the goal is reached; says how it goes.

    Raises:
        LateError: it was not reached in time.
        ResiHPError: it will not be, or the job is over or out of reach.
    """
    until_s = patience.clock() + patience.wait_s
    said = ""
    while True:
        status = job.status()
        node = node_of(status, name)
        done = goal.reached(node, status)
        if done:
            say(done)
            return
        how = f"{goal.progress(node, status)} ({_doing(status)})"
        if patience.clock() >= until_s:
            raise LateError(f"node {name}: {how}, after {patience.wait_s:g} s")
        if how != said:
            said = how
            say(f"step {status['step']}: {how}")
        patience.sleep(min(LOOK_S, max(0.0, until_s - patience.clock())))


def _doing(status: Status) -> str:
    reasons = (status["under_way"], status["refused"] and f"refused: {status['refused']}")
    return ": ".join((status["phase"], "; ".join(filter(None, reasons)))).removesuffix(": ")
