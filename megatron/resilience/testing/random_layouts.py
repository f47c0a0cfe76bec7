"""Random plans for a small model, and the kinds of unevenness that a plan has.

A plan is drawn until it has the kind that is wanted, so that a short series covers all kinds. The
same seed gives the same series everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from random import Random

from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Route, Stage

HOME = 2
"""Ranks of a node; before any exclusion they were one tensor-parallel group."""


class LayoutKind(StrEnum):
    """The ways in which a layout can differ from Megatron's uniform grid."""

    DEGREES = "tp degrees differ between stages and between replicas"
    DEPTHS = "layers per stage differ"
    CROSSING = "a micro-batch goes on in another replica"
    SHARES = "micro-batches per replica differ"
    MAPS = "layer maps differ between replicas"
    ODD_DEGREES = "a tp degree is no power of two"
    POOLED = "healthy devices freed by an exclusion work elsewhere"


def kinds(plan: Plan) -> frozenset[LayoutKind]:
    """Which kinds a plan has."""
    return frozenset(kind for kind, has in _TESTS.items() if has(plan))


def _degrees_differ(plan: Plan) -> bool:
    between_stages = any(len({s.tp for s in one.stages}) > 1 for one in plan.replicas)
    degrees: dict[int, set[int]] = {}
    for one in plan.replicas:
        for stage in one.stages:
            for layer in range(*stage.layers):
                degrees.setdefault(layer, set()).add(stage.tp)
    return between_stages and any(len(found) > 1 for found in degrees.values())


def _depths_differ(plan: Plan) -> bool:
    return any(len({stage.depth for stage in one.stages}) > 1 for one in plan.replicas)


def _routes_cross(plan: Plan) -> bool:
    return any(len({instance.replica for instance in route}) > 1 for route in plan.routes)


def _shares_differ(plan: Plan) -> bool:
    """What counts is the work done, as a micro-batch can be shared between replicas."""
    layers = Counter(dict.fromkeys(range(len(plan.replicas)), 0))
    for route in plan.routes:
        for instance in route:
            layers[instance.replica] += plan.stage(instance).depth
    return len(set(layers.values())) > 1


def _maps_differ(plan: Plan) -> bool:
    return len({tuple(stage.layers for stage in one.stages) for one in plan.replicas}) > 1


def _degrees_are_odd(plan: Plan) -> bool:
    return any(stage.tp & (stage.tp - 1) for one in plan.replicas for stage in one.stages)


def _devices_are_pooled(plan: Plan) -> bool:
    """A slow device stands by, and a healthy one of its node works with devices of another node."""
    standby = set(plan.standby)
    left = {d.node for d in plan.devices if d.rank in standby and d.p < 1}
    node = {device.rank: device.node for device in plan.devices}
    return any(
        len(homes) > 1 and homes & left
        for one in plan.replicas
        for stage in one.stages
        for homes in [{node[rank] for rank in stage.ranks}]
    )


_TESTS: dict[LayoutKind, Callable[[Plan], bool]] = {
    LayoutKind.DEGREES: _degrees_differ,
    LayoutKind.DEPTHS: _depths_differ,
    LayoutKind.CROSSING: _routes_cross,
    LayoutKind.SHARES: _shares_differ,
    LayoutKind.MAPS: _maps_differ,
    LayoutKind.ODD_DEGREES: _degrees_are_odd,
    LayoutKind.POOLED: _devices_are_pooled,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What a random plan has to fit, and what it must have."""

    num_layers: int
    micro_batches: int
    degrees: tuple[int, ...]
    """Tensor-parallel degrees that the model allows."""
    kinds: Collection[LayoutKind] = ()
    chunks: int = 1
    """Model chunks of a rank in the first replica."""
    fewest: int = 4
    most: int = 8
    """Ranks, standbys included."""


def random_layout(random: Random, wanted: Wanted) -> Plan:
    """Draws a plan that has all that is wanted."""
    while True:
        plan = _draw(random, wanted)
        if plan is not None and set(wanted.kinds) <= kinds(plan):
            return plan


def _draw(random: Random, wanted: Wanted) -> Plan | None:
    """One attempt; None when it takes too many ranks or too few, or is a single group."""
    edges = _edges(random, wanted.num_layers)
    drawn = []
    for number in range(random.choice([1, 2, 2, 2, 3])):
        own = _edges(random, wanted.num_layers) if random.random() < 0.5 else edges
        drawn.append(_degrees(random, own, wanted, wanted.chunks if number == 0 else 1))
    used = sum(sum(degrees) for _, degrees in drawn)
    world = used + random.choice([0, 0, 1, 2])
    groups = sum(len(degrees) for _, degrees in drawn)
    if groups < 2 or not wanted.fewest <= world <= wanted.most:
        return None
    ranks = random.sample(range(world), world)
    replicas = tuple(_replica(edges, degrees, ranks) for edges, degrees in drawn)
    # What is left in ``ranks`` stands by: for being slow, or as a spare.
    devices = tuple(
        Device(rank=r, node=r // HOME, p=random.choice([0.5, 1.0]) if r in ranks else 1.0)
        for r in range(world)
    )
    routes = _routes(random, replicas, wanted.micro_batches)
    return Plan(
        version=0,
        num_layers=wanted.num_layers,
        devices=devices,
        replicas=replicas,
        routes=routes,
    ).validated()


def _edges(random: Random, num_layers: int) -> list[int]:
    inner = random.sample(range(1, num_layers), random.choice([0, 1, 1, 2]))
    return [0, *sorted(inner), num_layers]


def _degrees(
    random: Random, edges: list[int], wanted: Wanted, chunks: int
) -> tuple[list[int], list[int]]:
    """Edges of the stages, and a degree for each group of ranks."""
    if chunks > 1:
        groups = random.choice([2, 3]) if chunks * 3 <= wanted.num_layers else 2
        inner = random.sample(range(1, wanted.num_layers), groups * chunks - 1)
        edges = [0, *sorted(inner), wanted.num_layers]
    count = (len(edges) - 1) // chunks
    return edges, [random.choice(wanted.degrees) for _ in range(count)]


def _replica(edges: list[int], degrees: list[int], ranks: list[int]) -> Replica:
    """Takes its ranks from the end of ``ranks``; stages beyond the groups are further chunks."""
    groups = [tuple(ranks.pop() for _ in range(degree)) for degree in degrees]
    return Replica(
        stages=tuple(
            Stage(ranks=groups[number % len(groups)], layers=layers)
            for number, layers in enumerate(pairwise(edges))
        )
    )


def _routes(random: Random, replicas: tuple[Replica, ...], micro_batches: int) -> tuple[Route, ...]:
    """Straight or crossing, with the replicas' chances drawn once, so that shares differ."""
    crossing = random.random() < 0.5
    chances = [random.choice([1, 2, 3]) for _ in replicas]
    return tuple(_route(random, replicas, chances, crossing) for _ in range(micro_batches))


def _route(
    random: Random, replicas: tuple[Replica, ...], chances: list[int], crossing: bool
) -> Route:
    route: list[Instance] = []
    at = 0
    while at < replicas[0].stages[-1].layers[1]:
        choices = [
            (Instance(replica=number, stage=index), stage.layers[1])
            for number, one in enumerate(replicas)
            for index, stage in enumerate(one.stages)
            if stage.layers[0] == at and (crossing or not route or number == route[0].replica)
        ]
        weights = [chances[instance.replica] for instance, _ in choices]
        ((instance, at),) = random.choices(choices, weights)
        route.append(instance)
    return tuple(route)
