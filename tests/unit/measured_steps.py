"""Steps as ranks tell of them, where every layer takes the same time on every healthy device."""

from __future__ import annotations

from random import Random

from resihp_ext.detector.timed import MicroBatch, RankStep, TimedAction
from resihp_ext.plan.action import Kind
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.schedule import one_forward_one_backward

LAYER_S = {Kind.FORWARD: 0.005, Kind.BACKWARD: 0.010}
TP_EXPONENT = 0.6
"""Two devices take two thirds of the time of one, not half."""


def measured(plan: Plan, rank: int, step: int, slow: float = 1.0) -> RankStep:
    """A rank's own work, which varies a little, and no waits to speak of.

    Args:
        slow: How many times as long its device takes.
    """
    program = one_forward_one_backward(plan)
    instance = plan.instance_of(rank)
    assert instance is not None
    stage = plan.stage(instance)
    layers = stage.depth / stage.tp**TP_EXPONENT
    actions, now_s = [], 0.0
    for number, action in enumerate(program.actions(instance)):
        wobble = 1 + 0.01 * Random(f"{rank}/{step}/{number}").uniform(-1, 1)
        layers_s = LAYER_S.get(action.kind)
        own_s = (1e-4 if layers_s is None else layers * layers_s) * wobble * slow
        actions.append(
            TimedAction(action.kind, action.micro_batch, action.chunk, now_s, own_s, 1e-4)
        )
        now_s += own_s + 1e-4
    batches = tuple(MicroBatch(number, 1024, 1024**2) for number in range(plan.micro_batches))
    return RankStep(rank, step, plan.version, 100.0 * step, now_s, tuple(actions), batches)
