"""From wishes (so many devices, each at least so fast) to groups of devices.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from resihp_ext.scheduler.prices import Group
from resihp_ext.scheduler.problem import Problem

ANY, ACROSS = -1, -2


@dataclass(frozen=True, slots=True, order=True)
class Want:
    """Devices for a stage."""

    tp: int
    p: float
    """Least throughput of each."""
    node: int = ANY
    """Where all of them are; or ``ANY``: on one node if possible; or ``ACROSS`` nodes."""


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
) -> dict[int, tuple[Group, ...]] | None:
    """Gives every wish its devices.

    The fastest wishes come first: whoever is served later is content with what is left. A group
    prefers devices of its own stage, then of its own replica. Where a node is named, it leaves
    faster devices than it needs to others.

    Args:
        ranks: Live devices that are free.

    Returns:
        Groups for each replica; None if devices are lacking, which may also be found where wishes
        across nodes could have been served with more care.
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
        _wants(wishes), key=lambda item: (item[2].node < 0, -item[2].p, -item[2].tp, item[:2])
    )
    for number, place, one in order:
        group = _pick(problem, one, left, (number, place), homes)
        if len(group) < one.tp:
            return None
        found[number, place] = group
        left -= set(group)
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
    want: Want,
    left: Collection[int],
    at: tuple[int, int],
    homes: Mapping[int, tuple[int, int]],
) -> Group:
    """Devices for one wish, fewer if there are no more."""
    node_of, p_of, tp = problem.cluster.node_of, problem.p_of, want.tp

    def strange(rank: int) -> int:
        home = homes.get(rank)
        return 0 if home == at else 1 if home and home[0] == at[0] else 2

    able = [rank for rank in left if p_of[rank] >= want.p]
    if want.node >= 0:
        there = [rank for rank in able if node_of[rank] == want.node]
        return tuple(sorted(there, key=lambda rank: (p_of[rank], strange(rank), rank))[:tp])
    by_node: dict[int, list[int]] = {}
    for rank in sorted(able, key=lambda rank: (strange(rank), -p_of[rank], rank)):
        by_node.setdefault(node_of[rank], []).append(rank)
    enough = [node for node, ranks in by_node.items() if len(ranks) >= tp]

    def far(node: int) -> int:
        return sum(map(strange, by_node[node][:tp]))

    if enough and want.node == ANY:
        # Of nodes that are equally near, the one with the fewest devices left to others.
        best = min(enough, key=lambda node: (far(node), len(by_node[node]), node))
        return tuple(by_node[best][:tp])
    nodes = sorted(by_node, key=lambda node: (-len(by_node[node]), far(node), node))
    return tuple([rank for node in nodes for rank in by_node[node]][:tp])
