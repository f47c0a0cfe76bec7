"""From wishes (so many devices, each at least so fast) to groups of devices.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from resihp_ext.scheduler.prices import Group
from resihp_ext.scheduler.problem import Problem


@dataclass(frozen=True, slots=True, order=True)
class Want:
    """Devices for a stage."""

    tp: int
    p: float
    """Least throughput of each."""


Choice = Want | Group
"""A wish, or a group as it is."""
Wishes = Mapping[int, tuple[Choice, ...]]
"""For replicas, by their number in the base plan, the stages they shall have."""


def demand(choices: Sequence[Choice], levels: Sequence[float]) -> tuple[int, ...]:
    """For each level, how many devices at least as fast are wanted."""
    wants = [one for one in choices if isinstance(one, Want)]
    return tuple(sum(one.tp for one in wants if one.p >= level) for level in levels)


def supply(problem: Problem, ranks: Collection[int], levels: Sequence[float]) -> tuple[int, ...]:
    """For each level, how many of the devices are at least as fast."""
    speeds = [problem.p_of[rank] for rank in ranks]
    return tuple(sum(p >= level for p in speeds) for level in levels)


def allocated(
    problem: Problem, wishes: Wishes, ranks: Collection[int]
) -> dict[int, tuple[Group, ...]]:
    """Gives every wish its devices.

    The fastest wishes come first: whoever is served later is content with what is left. A group
    stays within a node where that is possible, and prefers devices of its own stage, then of its
    own replica.

    Args:
        ranks: Live devices that are free, enough at each level.
    """
    homes = {
        rank: (number, place)
        for number, one in enumerate(problem.base.replicas)
        for place, stage in enumerate(one.stages)
        for rank in stage.ranks
    }
    left = set(ranks)
    found: dict[tuple[int, int], Group] = {}
    order = sorted(
        ((-one.p, -one.tp, number, place) for number, place, one in _wants(wishes)),
    )
    for p, tp, number, place in order:
        able = [rank for rank in left if problem.p_of[rank] >= -p]
        found[number, place] = _pick(problem, able, -tp, (number, place), homes)
        left -= set(found[number, place])
    return {
        number: tuple(
            found[number, place] if isinstance(one, Want) else one
            for place, one in enumerate(choices)
        )
        for number, choices in wishes.items()
    }


def _wants(wishes: Wishes) -> list[tuple[int, int, Want]]:
    return [
        (number, place, one)
        for number, choices in wishes.items()
        for place, one in enumerate(choices)
        if isinstance(one, Want)
    ]


def _pick(
    problem: Problem,
    able: Collection[int],
    tp: int,
    at: tuple[int, int],
    homes: Mapping[int, tuple[int, int]],
) -> Group:
    node_of, p_of = problem.cluster.node_of, problem.p_of

    def strange(rank: int) -> int:
        home = homes.get(rank)
        return 0 if home == at else 1 if home and home[0] == at[0] else 2

    by_node: dict[int, list[int]] = {}
    for rank in sorted(able, key=lambda rank: (strange(rank), -p_of[rank], rank)):
        by_node.setdefault(node_of[rank], []).append(rank)
    enough = {node: ranks[:tp] for node, ranks in by_node.items() if len(ranks) >= tp}
    if enough:
        # Of nodes that are equally near, the one with the fewest devices left to others.
        return tuple(
            min(
                enough.items(),
                key=lambda item: (sum(map(strange, item[1])), len(by_node[item[0]]), item[0]),
            )[1]
        )
    near = Counter({node: -sum(map(strange, ranks[:tp])) for node, ranks in by_node.items()})
    nodes = sorted(by_node, key=lambda node: (-len(by_node[node]), -near[node], node))
    return tuple([rank for node in nodes for rank in by_node[node]][:tp])
