"""Valid plans of every kind: uneven degrees, layer maps, shares, crossing routes, several chunks.

One builder with two sources of choices: a seed, or Hypothesis, which then finds small examples.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random

from hypothesis import strategies as st

from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Route, Stage, uniform_plan


def random_plan(seed: int) -> Plan:
    """One to three replicas of one to four stages each; now and then a standby. No chunks."""
    return build_plan(Random(seed), version=seed)


@st.composite
def plans(draw: st.DrawFn, *, num_layers: int | None = None) -> Plan:
    """All kinds, a quarter of them uniform."""
    random = draw(st.randoms(use_true_random=False))
    if random.randint(0, 3) == 3:
        return build_uniform_plan(random, num_layers)
    return build_plan(random, num_layers=num_layers, most_chunks=random.choice([1, 2, 4]))


def build_uniform_plan(random: Random, num_layers: int | None = None) -> Plan:
    pp, virtual, dp = random.randint(1, 4), random.randint(1, 3), random.randint(1, 2)
    stages = pp * virtual
    if num_layers is not None and num_layers % stages:
        pp, virtual, stages = 1, num_layers, num_layers
    return uniform_plan(
        num_layers=num_layers or stages * random.randint(1, 2),
        tp=random.randint(1, 2),
        pp=pp,
        dp=dp,
        virtual=virtual,
        micro_batches=dp * random.randint(1, 8),
    )


def build_plan(
    random: Random, *, version: int = 0, num_layers: int | None = None, most_chunks: int = 1
) -> Plan:
    """Any plan; with ``most_chunks`` ranks hold several stages of their replica."""
    num_layers = num_layers or random.randint(4, 9)
    shared = random_edges(random, num_layers, most_chunks)
    ranks = iter(range(1000))
    replicas = tuple(
        random_replica(
            random,
            shared if random.random() < 0.6 else random_edges(random, num_layers, most_chunks),
            ranks,
            most_chunks,
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
        version=version, num_layers=num_layers, devices=devices, replicas=replicas, routes=routes
    ).validated()


def random_edges(random: Random, num_layers: int, most_chunks: int) -> list[int]:
    cuts = random.randint(0, 3 if most_chunks == 1 else num_layers - 1)
    return [0, *sorted(random.sample(range(1, num_layers), cuts)), num_layers]


def random_replica(
    random: Random, edges: list[int], ranks: Iterator[int], most_chunks: int
) -> Replica:
    chunks: dict[tuple[int, ...], int] = {}
    stages = []
    for low, high in pairwise(edges):
        open_groups = [group for group, count in chunks.items() if count < most_chunks]
        if open_groups and random.random() < 0.6:
            group = random.choice(open_groups)
        else:
            group = tuple(next(ranks) for _ in range(random.choice([1, 1, 2, 3])))
        chunks[group] = chunks.get(group, 0) + 1
        stages.append(Stage(ranks=group, layers=(low, high)))
    return Replica(stages=tuple(stages))


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
