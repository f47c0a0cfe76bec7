"""The paper's planner: adapt TP, then PP, then DP.

1. *TP, selective exclusion.* Of each damaged group keep the ``k`` devices that maximise
   ``k * min(p)``, ``k`` a power of two that divides the model, not below what memory demands. Of
   equal choices the smaller: it communicates less. A replica with a group that cannot be kept is
   given up as a whole, since a plan has no replicas with holes.
2. *PP, layer repartition.* One partition for all replicas. A stage is as fast as its slowest
   instance; see :func:`resihp_ext.scheduler.layers.repartitioned`.
3. *DP, workload migration*; see :mod:`resihp_ext.scheduler.migrate`.

Every step takes the one before as given; that is what the joint planner does without.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resihp_ext.plan.plan import Instance, Plan, Replica, Route, Stage
from resihp_ext.scheduler.infeasible import no_plan
from resihp_ext.scheduler.layers import Depths, edges, repartitioned
from resihp_ext.scheduler.migrate import migrated
from resihp_ext.scheduler.movement import arranged
from resihp_ext.scheduler.problem import Problem

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A replica after the first step."""

    old: Replica
    groups: tuple[Group, ...]


def progressive(problem: Problem) -> Plan:
    """Adapts the nominal layout to the devices as they are.

    Raises:
        InfeasibleError: no replica can be kept.
    """
    kept, partition = _adapted(problem)
    replicas = tuple(
        Replica(
            stages=tuple(
                Stage(ranks=arranged(problem, group, layers), layers=layers)
                for group, layers in zip(one.groups, edges(depths), strict=True)
            )
        )
        for one, depths in zip(kept, partition, strict=True)
    )
    return problem.current.next_version(
        devices=problem.cluster.devices,
        replicas=replicas,
        routes=_routes(problem, replicas),
    )


def _adapted(problem: Problem) -> tuple[list[_Kept], list[Depths]]:
    """TP and PP, for as many replicas as memory allows."""
    shards = len(problem.base.replicas)
    while True:
        kept = [
            _Kept(one, tuple(groups))
            for one in problem.base.replicas
            for groups in (_groups(problem, one, shards),)
            if groups is not None
        ]
        if not kept:
            raise no_plan(problem)
        if len(kept) < shards:
            # With fewer replicas each holds a larger part of a sharded optimizer's state.
            shards = len(kept)
            continue
        partition = _partition(problem, kept)
        if partition is not None:
            return kept, partition
        raise no_plan(problem)


def _groups(problem: Problem, one: Replica, shards: int) -> list[Group] | None:
    found = []
    for place in range(len(one.stages)):
        group = _subgroup(problem, one, place, shards)
        if group is None:
            return None
        found.append(group)
    return found


def _subgroup(problem: Problem, one: Replica, place: int, shards: int) -> Group | None:
    """The devices of one stage that go on; None if none can."""
    stage = one.stages[place]
    p_of = problem.p_of
    alive = sorted((r for r in stage.ranks if p_of[r] > 0), key=lambda rank: (-p_of[rank], rank))
    if len(alive) == stage.tp and p_of[alive[-1]] >= 1:
        return stage.ranks
    if not problem.options.exclusion:
        return stage.ranks if len(alive) == stage.tp else None
    best: tuple[float, Group] | None = None
    degree = 1
    while degree <= len(alive):
        worth = degree * p_of[alive[degree - 1]]
        room = problem.most_layers(tp=degree, place=place, stages=len(one.stages), shards=shards)
        fits = degree in problem.valid_tps(degree) and room >= stage.depth
        if fits and (best is None or worth > best[0]):
            best = (worth, tuple(alive[:degree]))
        degree *= 2
    return best[1] if best else None


def _partition(problem: Problem, kept: Sequence[_Kept]) -> list[Depths] | None:
    """Layers of each stage of each replica; all the same if they were."""
    shapes = {tuple(stage.depth for stage in one.old.stages) for one in kept}
    if len(shapes) > 1:
        # No layer map to share: each keeps its own, which the first step found to fit.
        return [tuple(stage.depth for stage in one.old.stages) for one in kept]
    (depths,) = shapes
    places, prices = range(len(depths)), problem.prices

    def speed(one: _Kept, place: int) -> float:
        group = one.groups[place]
        return len(group) * prices.slowest(group) / one.old.stages[place].tp

    speeds = [min(speed(one, place) for one in kept) for place in places]
    limits = [
        min(
            problem.most_layers(tp=tp, place=place, stages=len(depths), shards=len(kept))
            for tp in {len(one.groups[place]) for one in kept}
        )
        for place in places
    ]
    if not problem.options.repartition:
        # A group that was kept holds its layers.
        return [depths] * len(kept)
    found = repartitioned(depths, speeds, limits)
    return None if found is None else [found] * len(kept)


def _routes(problem: Problem, replicas: Sequence[Replica]) -> tuple[Route, ...]:
    homes = [number % len(replicas) for number in range(problem.current.micro_batches)]
    straight = [
        tuple(Instance(replica=number, stage=place) for place in range(len(one.stages)))
        for number, one in enumerate(replicas)
    ]
    apart = len({tuple(stage.layers for stage in one.stages) for one in replicas}) > 1
    if apart or not problem.options.migration:
        return tuple(straight[home] for home in homes)
    times = [tuple(problem.prices.times(stage) for stage in one.stages) for one in replicas]
    known = {(number,) * len(one): one for number, one in enumerate(straight)}
    routes = []
    for way in migrated(times, homes, problem.options.delta):
        if way not in known:
            known[way] = tuple(Instance(replica=r, stage=s) for s, r in enumerate(way))
        routes.append(known[way])
    return tuple(routes)
