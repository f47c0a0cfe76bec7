"""Random valid plans: uneven degrees, layer maps, shares and crossing routes, from a seed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random

from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Route, Stage


def random_plan(seed: int) -> Plan:
    """One to three replicas of one to four stages each; now and then a standby."""
    random = Random(seed)
    num_layers = random.randint(4, 9)
    shared = random_edges(random, num_layers)
    ranks = iter(range(1000))
    replicas = tuple(
        random_replica(
            random, shared if random.random() < 0.6 else random_edges(random, num_layers), ranks
        )
        for _ in range(random.randint(1, 3))
    )
    used = next(ranks)
    devices = tuple(
        Device(rank=rank, node=rank // 4, p=random.choice([1.0, 1.0, 0.5, 0.8]))
        for rank in range(used + random.randint(0, 2))
    )
    routes = tuple(random_route(random, replicas) for _ in range(random.randint(1, 12)))
    return Plan(
        version=seed, num_layers=num_layers, devices=devices, replicas=replicas, routes=routes
    ).validated()


def random_edges(random: Random, num_layers: int) -> list[int]:
    inner = random.sample(range(1, num_layers), random.randint(0, 3))
    return [0, *sorted(inner), num_layers]


def random_replica(random: Random, edges: list[int], ranks: Iterator[int]) -> Replica:
    return Replica(
        stages=tuple(
            Stage(
                ranks=tuple(next(ranks) for _ in range(random.choice([1, 1, 2, 3]))),
                layers=(low, high),
            )
            for low, high in pairwise(edges)
        )
    )


def random_route(random: Random, replicas: tuple[Replica, ...]) -> Route:
    """Goes on in any replica that has a stage beginning at the layer reached."""
    num_layers = replicas[0].stages[-1].layers[1]
    route: list[Instance] = []
    at = 0
    while at < num_layers:
        choices = [
            (Instance(replica=number, stage=index), stage.layers[1])
            for number, one in enumerate(replicas)
            for index, stage in enumerate(one.stages)
            if stage.layers[0] == at
        ]
        instance, at = random.choice(choices)
        route.append(instance)
    return tuple(route)
