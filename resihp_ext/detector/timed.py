"""What one rank has measured of one step: the input of everything that looks for slowness.

All clocks are those of the rank that measured; ``begun_s`` alone is in seconds since the epoch.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import msgspec

from resihp_ext.plan.action import Kind


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """What decides how long a micro-batch takes."""

    number: int
    """In the global batch."""
    tokens: int
    squared: int
    """Sum of the squared segment lengths."""


class TimedAction(msgspec.Struct, frozen=True, array_like=True):
    """One action of a program, as it was executed."""

    kind: Kind
    micro_batch: int
    """-1 for SYNC and STEP."""
    chunk: int
    start_s: float
    """Since the rank's step began."""
    own_s: float
    """Spent on own work: without waiting for other ranks."""
    wait_s: float
    """Spent waiting: for a message, or for partners of the tensor-parallel group or sync domain,
    with what they then do together."""

    @property
    def end_s(self) -> float:
        """When it was over, since the rank's step began."""
        return self.start_s + self.own_s + self.wait_s


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of one rank."""

    rank: int
    step: int
    """From 1, as logs count them."""
    version: int
    """Of the plan that ran."""
    begun_s: float
    """Seconds since the epoch."""
    total_s: float
    """From the end of the rank's step before to the end of this one: what a person would call
    the time of an iteration, without checkpoints and evaluations between the two."""
    actions: tuple[TimedAction, ...]
    """In the order of execution."""
    micro_batches: tuple[MicroBatch, ...]
    """Those that this rank has run."""
