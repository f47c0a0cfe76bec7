"""When no layout near the base plan holds the model: equal groups of whatever is left.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator

from resihp_ext.scheduler.decision import Judge
from resihp_ext.scheduler.layouts import Groups, Layouts
from resihp_ext.scheduler.prices import Group
from resihp_ext.scheduler.problem import Problem


def rebuilt(problem: Problem, judge: Judge) -> None:
    """Offers, for every degree that divides the model and every number of stages, as many replicas
    as there are devices for, up to those of the base plan; fewer if more do not fit."""
    layouts = Layouts(problem, judge.predictor, ())
    for groups in _layouts(problem):
        plan = layouts.plan(groups)
        if plan is not None:
            judge.offer("rebuilt", plan)


def _layouts(problem: Problem) -> Iterator[Groups]:
    widest = max((len(ranks) for ranks in _by_node(problem).values()), default=0)
    for tp in problem.valid_tps(widest):
        groups = _groups(problem, tp)
        for stages in range(1, min(len(groups), problem.shape.num_layers) + 1):
            most = min(len(problem.base.replicas), len(groups) // stages)
            for replicas in dict.fromkeys((most, 1)):
                yield {
                    number: tuple(groups[number * stages : (number + 1) * stages])
                    for number in range(replicas)
                }


def _groups(problem: Problem, tp: int) -> list[Group]:
    """As many as each node has devices for, the fastest devices first."""
    p_of = problem.p_of
    groups = [
        tuple(ranks[low : low + tp])
        for ranks in _by_node(problem).values()
        for low in range(0, len(ranks) - tp + 1, tp)
    ]
    return sorted(groups, key=lambda group: (-min(p_of[rank] for rank in group), group))


def _by_node(problem: Problem) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for device in sorted(problem.cluster.alive, key=lambda one: (-one.p, one.rank)):
        found.setdefault(device.node, []).append(device.rank)
    return found
