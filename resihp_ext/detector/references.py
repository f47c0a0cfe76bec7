"""Which ranks measure what when a suspect is validated: the suspect, and few healthy ones.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import combinations

from resihp_ext.detector.probe import MOST_RANKS, Task, TaskKind
from resihp_ext.detector.suspect import Suspect
from resihp_ext.plan.plan import Plan

REFERENCES = 2
"""Healthy devices, links or hosts that a suspect is compared with: all others go on."""


def tasks_for(suspect: Suspect, plan: Plan, healthy: Collection[int]) -> tuple[Task, ...]:
    """The micro-benchmarks that validate a suspect.

    Args:
        plan: That runs; says which devices there are, and on which nodes.
        healthy: Ranks that nobody suspects.

    Returns:
        Nothing if there is nobody to compare with, or a suspect's device is not there.
    """
    node_of = {one.rank: one.node for one in plan.devices if one.alive}
    free = sorted(set(healthy) & node_of.keys() - set(suspect.ranks))
    if not free or not set(suspect.ranks) <= node_of.keys():
        return ()
    if suspect.kind == "link":
        return _links(suspect, node_of, free)
    if suspect.kind == "host":
        return _host(suspect, node_of, free)
    (rank,) = suspect.ranks
    chosen = _devices(rank, node_of, free)
    return (Task(TaskKind.GEMM, tuple(sorted((rank, *chosen)))),)


def _devices(rank: int, node_of: Mapping[int, int], free: Sequence[int]) -> list[int]:
    """One on the same node, which is surely of the same kind, and one elsewhere, if there are."""
    after = sorted(free, key=lambda other: ((other < rank), other))  # not the same for all suspects
    near = [other for other in after if node_of[other] == node_of[rank]]
    far = [other for other in after if node_of[other] != node_of[rank]]
    first = near[:1] + far[: REFERENCES - 1]
    return [*first, *(other for other in after if other not in first)][:REFERENCES]


def _host(suspect: Suspect, node_of: Mapping[int, int], free: Sequence[int]) -> tuple[Task, ...]:
    mine = suspect.ranks[: MOST_RANKS - REFERENCES]
    nodes = {node_of[rank] for rank in mine}
    others: dict[int, list[int]] = defaultdict(list)
    for rank in free:
        if node_of[rank] not in nodes:
            others[node_of[rank]].append(rank)
    if not others:
        return ()
    spread = [ranks[0] for ranks in others.values()]
    spread += [rank for ranks in others.values() for rank in ranks[1:]]
    tasks = [Task(TaskKind.GEMM, tuple(sorted((*mine, *spread[:REFERENCES]))))]
    rings = [tuple(ranks[: len(mine)]) for ranks in others.values() if len(ranks) >= len(mine)]
    if len(mine) > 1 and rings:
        tasks += [Task(TaskKind.ALL_REDUCE, ring) for ring in (mine, *rings[:REFERENCES])]
    return tuple(tasks)


def _links(suspect: Suspect, node_of: Mapping[int, int], free: Sequence[int]) -> tuple[Task, ...]:
    """Pairs that cross nodes are compared with others that cross other nodes."""
    first, second = sorted(suspect.ranks)
    at_node: dict[int, list[int]] = defaultdict(list)
    for rank in free:
        at_node[node_of[rank]].append(rank)
    ends = node_of[first], node_of[second]
    pairs = _inside(ends[0], at_node) if ends[0] == ends[1] else _between(ends, at_node)
    used: set[int] = set()
    chosen = []
    for pair in pairs:
        if not used & set(pair):
            chosen.append(pair)
            used.update(pair)
        if len(chosen) == REFERENCES:
            break
    if not chosen:
        return ()
    return tuple(Task(TaskKind.P2P, pair) for pair in ((first, second), *chosen))


def _inside(node: int, at_node: Mapping[int, Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Pairs of one node: other nodes come first."""
    for one in sorted(at_node, key=lambda other: (other == node, other)):
        yield from zip(at_node[one][::2], at_node[one][1::2], strict=False)


def _between(
    ends: tuple[int, int], at_node: Mapping[int, Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """Pairs of two nodes, never of the two that are suspected: those that touch neither first."""
    apart = [node for node in sorted(at_node) if node not in ends]
    for one, other in combinations(apart, 2):
        yield at_node[one][0], at_node[other][0]
    for one in apart:
        for other in ends:
            if at_node.get(other):
                yield at_node[one][-1], at_node[other][0]
