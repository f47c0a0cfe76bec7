"""What an operator may tell the planners.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Settings of a decision."""

    expected_lifetime_s: float = 1800.0
    """How long a new plan is expected to last: the time over which a transition must pay."""
    delta: int = 1
    """Gap in micro-batches, between replicas at one stage, beyond which one is moved (Algorithm
    1)."""
    least_gain: float = 0.0
    """Part of the time of a step that a change must save, or the job stays as it is, if it can: a
    prediction's error is no reason to move."""
    runners_up: int = 5
    """Most alternatives that a decision tells of."""
    effort: int = 40
    """Layouts that the joint search times exactly; each costs about a millisecond."""
    exclusion: bool = True
    """Whether the progressive planner may leave single devices of a TP group out. Without, a group
    runs whole or not at all; this and the next two are there to see what each step is worth."""
    repartition: bool = True
    """Whether it may move layers between stages."""
    migration: bool = True
    """Whether it may move micro-batches between replicas."""

    def __post_init__(self) -> None:
        if not self.expected_lifetime_s > 0:
            raise UserError(f"expected lifetime {self.expected_lifetime_s} s: must be positive")
        if not 0 <= self.least_gain < 1:
            raise UserError(f"least gain {self.least_gain}: must be a part of 1")
        if self.delta < 1 or self.runners_up < 0 or self.effort < 1:
            raise UserError(
                f"delta {self.delta} and effort {self.effort} must be at least 1, "
                f"runners-up {self.runners_up} at least 0"
            )
