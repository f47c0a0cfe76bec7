"""Messages of validations: what is to be measured, and what was.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from resihp_ext.control.schema import Count, Message, Rank
from resihp_ext.detector.probe import MOST_TASKS, Measured, Task


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
