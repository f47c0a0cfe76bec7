"""How Malleus cuts a node with slow or dead devices into TP groups of powers of two.

Source: BASELINES 6, from Hetu's ``strategy.py``. A node of ``G`` devices keeps ``G - tp`` in full
groups, the fastest ones; the rest is cut into groups of powers of two, fast devices together, so
that the sum of their rates is largest. What is in no group is suspended. Hetu looks at falling
powers (4, 2, 1) in some orders of the devices; here all cuts of the sorted devices are looked at,
which includes those that can be best, since a group is as slow as its slowest member.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from resihp_ext.scheduler.prices import Group


@dataclass(frozen=True, slots=True)
class Node:
    """What there is to cut."""

    ranks: tuple[int, ...]
    """Alive or dead."""
    nominal: tuple[Group, ...]
    """Groups that it has in the nominal layout."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The groups of a node."""

    full: tuple[Group, ...]
    rest: tuple[Group, ...]


Rate = Callable[[int, float], float]
"""Layers a second of a group, by its degree and the throughput of its slowest member."""


def cuts_of(
    node: Node, p: Mapping[int, float], tp: int, degrees: Sequence[int], rate: Rate
) -> list[Cut]:
    """The cuts worth a look: the largest sum of rates; the fastest single group; the nominal one.

    Args:
        p: Of devices that are not healthy; 0 is dead.
        tp: Of a full group.
        degrees: Powers of two that a group may have.
    """
    alive = sorted(
        (rank for rank in node.ranks if p.get(rank, 1.0) > 0),
        key=lambda rank: (-p.get(rank, 1.0), rank),
    )
    most = min(max(0, (len(node.ranks) - tp) // tp), len(alive) // tp)
    full = _full(node, alive, p, tp, most)
    taken = {rank for group in full for rank in group}
    rest = [rank for rank in alive if rank not in taken]

    def total(groups: Sequence[Group]) -> float:
        return sum(rate(len(one), min(p.get(rank, 1.0) for rank in one)) for one in groups)

    every = sorted(_cut(rest, degrees), key=lambda groups: (-total(groups), len(groups)))
    single = [groups for groups in every if len(groups) == 1]
    found = [Cut(full, groups) for groups in (*every[:1], *single[:1])]
    if all(p.get(rank, 1.0) > 0 for group in node.nominal for rank in group):
        found.append(Cut(node.nominal, ()))
    return list(dict.fromkeys(found))


def _full(
    node: Node, alive: Sequence[int], p: Mapping[int, float], tp: int, most: int
) -> tuple[Group, ...]:
    """Healthy groups stay as they are; others are made of the fastest devices left."""
    kept = [group for group in node.nominal if len(group) == tp and all(r not in p for r in group)][
        :most
    ]
    taken = {rank for group in kept for rank in group}
    free = [rank for rank in alive if rank not in taken]
    more = most - len(kept)
    made = [tuple(sorted(free[i * tp : (i + 1) * tp])) for i in range(more)]
    return (*kept, *made)


def _cut(ranks: Sequence[int], degrees: Sequence[int]) -> Iterator[tuple[Group, ...]]:
    """All ways to cut a row of devices into groups; those at its end may be left out."""
    yield ()
    for degree in degrees:
        if degree <= len(ranks):
            group = tuple(sorted(ranks[:degree]))
            for others in _cut(ranks[degree:], degrees):
                yield (group, *others)
