"""Why there is no plan: which constraint fails, and by how much.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.plan.plan import PlanError, Replica
from resihp_ext.scheduler.problem import Problem


class InfeasibleError(PlanError):
    """No layout of the live devices holds the model."""


@dataclass(frozen=True, slots=True)
class _Gap:
    """How far a stage is from being possible."""

    over_bytes: int
    text: str


def no_plan(problem: Problem) -> InfeasibleError:
    """Explains by the replica that comes closest, and by its worst stage."""
    alive = len(problem.cluster.alive)
    if not alive:
        return InfeasibleError(f"no plan: none of {len(problem.cluster.devices)} devices is alive")
    gaps = [_worst(problem, one) for one in problem.base.replicas]
    number = min(range(len(gaps)), key=lambda index: gaps[index].over_bytes)
    return InfeasibleError(
        f"no plan for {alive} live of {len(problem.cluster.devices)} devices; closest is replica "
        f"{number}: {gaps[number].text}"
    )


def _worst(problem: Problem, one: Replica) -> _Gap:
    gaps = [_gap(problem, one, place) for place in range(len(one.stages))]
    return max(gaps, key=lambda gap: gap.over_bytes)


def _gap(problem: Problem, one: Replica, place: int) -> _Gap:
    stage, there = one.stages[place], problem.cluster.memory_bytes
    live = sum(problem.p_of[rank] > 0 for rank in stage.ranks)
    if not live:
        return _Gap(10 * there, f"stage {place} has none of its {stage.tp} devices left")
    tps = problem.valid_tps(stage.tp)
    tp = max(degree for degree in tps if degree <= live)
    needs = _needs(problem, one, place, tp)
    enough = [degree for degree in tps if _needs(problem, one, place, degree) <= there]
    least = (
        f"least feasible degree {enough[0]}" if enough else f"no degree up to {stage.tp} is enough"
    )
    text = (
        f"stage {place} needs {needs / 1e9:.1f} GB a device at TP {tp}, {there / 1e9:.1f} GB are "
        f"there; {least}, {live} live device{'s' if live > 1 else ''}"
    )
    return _Gap(needs - there, text)


def _needs(problem: Problem, one: Replica, place: int, tp: int) -> int:
    stage, stages = one.stages[place], len(one.stages)
    memory = problem.memory(
        stage.depth, tp, place == 0, place == stages - 1, len(problem.base.replicas)
    )
    return memory.total(stages - place)
