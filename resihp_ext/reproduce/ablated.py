"""The paper's planner with some of its three steps only, and policies with other parameters.

What is left when a step is off: without device exclusion a TP group runs whole, at the pace of its
slowest device, and a group with a dead one is lost, and its replica with it; without layer
repartition stages keep their layers; without workload migration replicas share micro-batches
evenly.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from resihp_ext.scheduler.problem import Problem
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policies.planned import Progressive
from resihp_ext.simulator.policies.recycle import ReCycle
from resihp_ext.simulator.policies.registry import policy_named
from resihp_ext.simulator.policy import Policy, View

STEPS = ("exclusion", "repartition", "migration")


class Ablated(Progressive):
    """Some of the steps."""

    def __init__(self, *steps: str) -> None:
        super().__init__()
        self._steps = steps
        self.name = "+".join(steps) or "no step"

    def problem(self, view: View, held: Layout) -> Problem:
        """The usual one, with steps switched off."""
        made = super().problem(view, held)
        switches = {step: step in self._steps for step in STEPS}
        return replace(made, options=replace(made.options, **switches))


VARIANTS: tuple[tuple[str, ...], ...] = (
    (),
    *((step,) for step in STEPS),
    ("exclusion", "repartition"),
    ("exclusion", "migration"),
    ("repartition", "migration"),
    STEPS,
)
ABLATED: dict[str, Callable[[], Policy]] = {
    " + ".join(one) or "no step": partial(Ablated, *one) for one in VARIANTS
}
"""By name."""
ROOMS, LIFETIMES_S = (1.0, 4.0), (600.0, 7200.0)
CHANGED: dict[str, Callable[[], Policy]] = {
    **{f"recycle, room {one:g}": partial(ReCycle, room_ratio=one) for one in ROOMS},
    **{f"progressive, {one:g} s": partial(Progressive, lifetime_s=one) for one in LIFETIMES_S},
}
"""Parameters that could not be checked, or are ours."""


def made(name: str) -> Policy:
    """A new object of one of these, or of a registered policy."""
    maker = ABLATED.get(name) or CHANGED.get(name)
    return maker() if maker is not None else policy_named(name)
