"""What a policy runs: a plan, and how its steps are scheduled.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resihp_ext.plan.plan import Plan
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import Duration, one_forward_one_backward

Build = Callable[[Plan, Duration], Program]
"""From a plan, and the believed seconds of F, B and W, to what every rank group does in a step."""


def whole_backward(plan: Plan, duration: Duration) -> Program:
    """1F1B."""
    return one_forward_one_backward(plan, duration=duration)


def split_backward(plan: Plan, duration: Duration) -> Program:
    """1F1B whose weight gradients fill gaps."""
    return one_forward_one_backward(plan, duration=duration, split_backward=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How the steps of a plan are done; equal schedules build equal programs."""

    name: str = "1f1b"
    build: Build = whole_backward
    """Called with a part of the plan: replicas that exchange micro-batches, and their routes."""
    split: bool = False
    """Whether ``B`` and ``W`` are apart in what is built."""
    staggered: bool = False
    """Whether each stage steps once its own gradients are reduced, and begins the next iteration
    while others are at work (ReCycle's staggered optimizer)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A plan, whose devices have the speeds that its owner believes in, and its schedule."""

    plan: Plan
    schedule: Schedule = Schedule()
