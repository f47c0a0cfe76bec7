"""What the coordinator's rules want done.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from resihp_ext.control.messages import Message
from resihp_ext.events import Event


@dataclass(frozen=True, slots=True)
class ToRank:
    """Send a worker a message, through the agent of its node."""

    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class ToNode:
    """Send an agent a message."""

    node: str
    message: Message


@dataclass(frozen=True, slots=True)
class NeedPlan:
    """Ask the planner; its answer is for ``Membership.planned``."""

    request: str
    devices: tuple[tuple[int, int, float], ...]
    """Of every place of the job: rank, number of the node, throughput; 0 may not be used."""
    problem: str
    plan: str
    """What ran until now."""
    version: int = 0
    """Of the new plan: no plan of this job has had it."""
    patient: bool = False
    """Whether other questions come first: members train meanwhile."""


class Answer(NamedTuple):
    """The planner's, to :class:`NeedPlan`."""

    plan: str | None
    """JSON; None: there is none."""
    why: str
    """What speaks against any plan, or for this one."""
    version: int = 0
    """Of the plan."""
    now_s: float = 0.0
    """Seconds of a step under the plan that runs, as the devices are; 0: it cannot run, or nobody
    knows."""
    then_s: float = 0.0
    """The same under this plan."""


@dataclass(frozen=True, slots=True)
class Prepare:
    """All run the plan in ``need``: the planner may think of what comes next."""

    need: NeedPlan


@dataclass(frozen=True, slots=True)
class Say:
    """A line for people, in the launcher's output."""

    line: str


@dataclass(frozen=True, slots=True)
class Record:
    """An event for ``events.jsonl``."""

    event: Event
    step: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """The job is over."""

    exit_code: int
    cause: str


Action = ToRank | ToNode | NeedPlan | Prepare | Say | Record | End
