"""Who takes which place: nodes around slow links, slow TP groups in few replicas.

Greyhound's third level (BASELINES 3.8, the paper's version). A layout gives nodes and groups
places; trading places changes neither layers nor degrees. The search is local: of all trades that
involve what is slow the best is done, until none helps.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from resihp_ext.plan.plan import Plan, Replica
from resihp_ext.simulator.health import Link
from resihp_ext.simulator.pricing import Pricing

ROUNDS = 4
"""Trades of nodes at most: each takes at most one slow link out of the way."""
TIMED = 12
"""Trades of a round that are timed, those that leave least on slow links first."""

Replicas = tuple[Replica, ...]


Deal = Callable[[Pricing, Sequence[Replica]], Sequence[int]]
"""Micro-batches of each replica."""


def placed(pricing: Pricing, plan: Plan, deal: Deal) -> Replicas | None:
    """Nodes in other places, so that slow links carry less; None: nothing helps."""
    best = plan.replicas
    best_s = pricing.iteration_s(plan)
    for _ in range(ROUNDS):
        trades = sorted(_node_trades(pricing, best), key=lambda one: _slow_load(pricing, one))
        timed = [(_dealt_s(pricing, one, deal), i, one) for i, one in enumerate(trades[:TIMED])]
        seconds, _, found = min(timed, default=(best_s, 0, best), key=lambda one: one[:2])
        if seconds >= best_s:
            break
        best_s, best = seconds, found
    return None if best is plan.replicas else best


def grouped(pricing: Pricing, plan: Plan, deal: Deal) -> Replicas | None:
    """Slow groups in as few replicas as possible; None: nothing to put together."""
    p = pricing.health.p
    slow = [
        (number, place)
        for number, one in enumerate(plan.replicas)
        for place, stage in enumerate(one.stages)
        if min(p.get(rank, 1.0) for rank in stage.ranks) < 1
    ]
    homes = sorted({number for number, _ in slow})
    if len(homes) < 2:
        return None
    found = [(_gathered(plan.replicas, slow, home), home) for home in homes]
    return min(found, key=lambda one: (_dealt_s(pricing, one[0], deal), one[1]))[0]


def _gathered(replicas: Replicas, slow: Sequence[tuple[int, int]], home: int) -> Replicas:
    """Slow groups change places with those of the same stage in one replica."""
    ranks = [[stage.ranks for stage in one.stages] for one in replicas]
    taken = {place for number, place in slow if number == home}
    for number, place in slow:
        alike = number != home and place < len(ranks[home]) and place not in taken
        if alike and len(ranks[home][place]) == len(ranks[number][place]):
            ranks[home][place], ranks[number][place] = ranks[number][place], ranks[home][place]
            taken.add(place)
    return tuple(
        Replica(
            stages=tuple(
                replace(stage, ranks=group) for stage, group in zip(one.stages, mine, strict=True)
            )
        )
        for one, mine in zip(replicas, ranks, strict=True)
    )


def _dealt_s(pricing: Pricing, replicas: Replicas, deal: Deal) -> float:
    return pricing.iteration_s(pricing.plan(replicas, deal(pricing, replicas)))


def _node_trades(pricing: Pricing, replicas: Replicas) -> Iterator[Replicas]:
    """An end of a slow link changes places with any other node of as many live devices."""
    members: dict[int, list[int]] = {}
    for one in pricing.setting.cluster.devices:
        members.setdefault(one.node, []).append(one.rank)
    dead = pricing.health.dead
    working = {pricing.setting.cluster.node_of[r] for one in replicas for r in one.ranks}
    done: set[Link] = set()
    for link in pricing.health.left:
        if not set(link) <= working:
            continue
        for end in link:
            for other in members:
                pair = (min(end, other), max(end, other))
                alike = len(members[end]) == len(members[other])
                if other in link or pair in done or not alike:
                    continue
                done.add(pair)
                if not dead & {*members[end], *members[other]}:
                    yield _traded(replicas, members[end], members[other])


def _traded(replicas: Replicas, ones: Iterable[int], others: Iterable[int]) -> Replicas:
    names: Mapping[int, int] = {
        a: b for pair in zip(ones, others, strict=True) for a, b in (pair, pair[::-1])
    }
    return tuple(
        Replica(
            stages=tuple(
                replace(stage, ranks=tuple(names.get(rank, rank) for rank in stage.ranks))
                for stage in one.stages
            )
        )
        for one in replicas
    )


def _slow_load(pricing: Pricing, replicas: Replicas) -> tuple[float, float]:
    """About what slow links carry: reductions, then boundary tensors, by what is left of them."""
    left, node_of = pricing.health.left, pricing.setting.cluster.node_of
    sync = hops = 0.0
    for (a, b), part in left.items():
        for place in range(max(len(one.stages) for one in replicas)):
            owners = [
                {node_of[rank] for rank in one.stages[place].ranks}
                for one in replicas
                if place < len(one.stages)
            ]
            ring = sorted(set().union(*owners))
            neighbours = {*pairwise(ring), (ring[0], ring[-1])}
            sync += ((a, b) in neighbours) / part
        for one in replicas:
            nodes = [{node_of[rank] for rank in stage.ranks} for stage in one.stages]
            for here, there in pairwise(nodes):
                hops += ((a in here and b in there) or (b in here and a in there)) / part
    return sync, hops
