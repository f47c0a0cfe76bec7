"""Messages about the speed of devices: what was timed, is to be measured, was measured, decided.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from resihp_ext.control.schema import Count, Line, Message, Name, Rank
from resihp_ext.detector.probe import MOST_TASKS, Measured, Task
from resihp_ext.detector.timed import RankStep

MOST_ACTIONS = 2**16
"""Of a rank in a step, and so of micro-batches."""


class Timed(Message, frozen=True, kw_only=True, tag="timed"):
    """Where the time of a step went in a worker: news that may get lost."""

    rank: Rank
    times: RankStep

    def __post_init__(self) -> None:
        most = max(len(self.times.actions), len(self.times.micro_batches))
        if self.times.rank != self.rank or most > MOST_ACTIONS:
            raise ValueError(f"times of rank {self.times.rank}, {most} actions: not acceptable")


class Weighed(Message, frozen=True, kw_only=True, tag="weighed"):
    """Whether another plan for slow devices is worth the change: for the job's events."""

    step: Count
    verdict: Name
    why: Line
    gain: float
    """Part of a step's time that the plan saves."""
    lost_s: float
    """For want of it."""
    cost_s: float
    """Of the change."""


class Probe(Message, frozen=True, kw_only=True, tag="probe"):
    """Micro-benchmarks for some members, at a boundary between steps on which all agree."""

    number: Annotated[int, Meta(gt=0, lt=2**53)]
    epoch: Count
    """Of the group of processes that does it; void in any other."""
    tasks: Annotated[tuple[Task, ...], Meta(min_length=1, max_length=MOST_TASKS)]


class Probed(Message, frozen=True, kw_only=True, tag="probed"):
    """What a worker has measured in a probe in which it took part."""

    rank: Rank
    number: Count
    step: Count
    """The one that begins after it."""
    took_s: float
    """At the boundary between two steps, in all."""
    measured: Annotated[tuple[Measured, ...], Meta(max_length=MOST_TASKS)]
    """Tasks that gave nothing are left out."""
