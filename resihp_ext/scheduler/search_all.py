"""All layouts of a small cluster, by what their groups look like, the most promising first.

A layout is, for each replica, a number of stages and for each stage a degree and the least
throughput of its devices; which devices these are follows. Nothing is left out but what cannot be
better than what a lower bound says, and layouts beyond ``MOST``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations, product
from math import comb

from resihp_ext.scheduler.maps import Maps, Site, Sites
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.wants import Choice, Want, demand, supply

MOST_VARIANTS = 2_000
MOST = 60_000
"""Layouts of all replicas together."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One replica's stages."""

    wants: tuple[Want, ...]
    needs: tuple[int, ...]
    """Devices at each level of throughput."""
    bounds_s: tuple[float, ...]
    """``bounds_s[m]``: no layer map runs ``m`` micro-batches in less time."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A layout without devices."""

    pipeline_s: float
    """A bound, transfers left out, as long as micro-batches stay in their replicas."""
    wishes: dict[int, tuple[Choice, ...]]
    ends_s: float = 0.0
    """About the time of SYNC and STEP."""
    effort: float = 0.0
    """About how many devices must take over something new."""


def sketches(problem: Problem, maps: Maps) -> list[Sketch] | None:
    """All layouts, ascending by their bound; None if the cluster is not small."""
    levels = sorted({device.p for device in problem.cluster.alive}, reverse=True)
    there = supply(problem, [device.rank for device in problem.cluster.alive], levels)
    variants = _variants(problem, maps, levels, there)
    if variants is None:
        return None
    replicas = len(problem.base.replicas)
    if sum(comb(len(variants) + n - 1, n) for n in range(1, replicas + 1)) > MOST:
        return None
    found = []
    for chosen in _together(variants, replicas, there):
        at_least_s = _shared_s(chosen, problem.current.micro_batches)
        found.append(Sketch(at_least_s, _placed(problem, chosen)))
    return sorted(found, key=lambda one: one.pipeline_s)


def _variants(
    problem: Problem, maps: Maps, levels: list[float], there: tuple[int, ...]
) -> list[Variant] | None:
    widest = Counter(device.node for device in problem.cluster.alive)
    tps = problem.shape.valid_tps(min(there[-1], max(widest.values())))
    wants = [
        Want(tp, p) for p, count in zip(levels, there, strict=True) for tp in tps if tp <= count
    ]
    deepest = max(len(one.stages) for one in problem.base.replicas)
    deepest = min(deepest, problem.shape.num_layers)
    if sum(len(wants) ** n for n in range(1, deepest + 1)) > MOST_VARIANTS:
        return None
    found = []
    for count in range(1, deepest + 1):
        for chosen in product(wants, repeat=count):
            needs = demand(chosen, levels)
            if any(need > have for need, have in zip(needs, there, strict=True)):
                continue
            bounds_s = _bounds(problem, maps, chosen)
            if bounds_s:
                found.append(Variant(chosen, needs, bounds_s))
    return found


def _bounds(problem: Problem, maps: Maps, wants: tuple[Want, ...]) -> tuple[float, ...]:
    sites: Sites = tuple(Site(one.tp, one.p, False) for one in wants)
    rated = maps.of(sites)
    if not rated:
        return ()
    return (
        0.0,
        *(
            min(one.at_least_s(m) for one in rated)
            for m in range(1, problem.current.micro_batches + 1)
        ),
    )


def _together(
    variants: list[Variant], replicas: int, there: tuple[int, ...]
) -> Iterator[tuple[Variant, ...]]:
    """Every set of one to ``replicas`` variants for which there are devices."""

    def grow(
        chosen: tuple[Variant, ...], start: int, left: tuple[int, ...]
    ) -> Iterator[tuple[Variant, ...]]:
        if chosen:
            yield chosen
        if len(chosen) == replicas:
            return
        for index in range(start, len(variants)):
            rest = tuple(a - b for a, b in zip(left, variants[index].needs, strict=True))
            if min(rest) >= 0:
                yield from grow((*chosen, variants[index]), index, rest)

    return grow((), 0, there)


def _shared_s(chosen: tuple[Variant, ...], micro_batches: int) -> float:
    """The best split by the bounds."""
    counts = [0] * len(chosen)
    for _ in range(micro_batches):
        best = min(range(len(chosen)), key=lambda i: (chosen[i].bounds_s[counts[i] + 1], i))
        counts[best] += 1
    return max(one.bounds_s[n] for one, n in zip(chosen, counts, strict=True))


def _placed(problem: Problem, chosen: tuple[Variant, ...]) -> dict[int, tuple[Choice, ...]]:
    """Gives each variant to the replica that has most of the devices it wants."""
    numbers = range(len(problem.base.replicas))
    own = [
        [sorted((problem.p_of[rank] for rank in stage.ranks), reverse=True) for stage in one.stages]
        for one in problem.base.replicas
    ]

    def suits(variant: Variant, number: int) -> int:
        pairs = zip(variant.wants, own[number], strict=False)
        return sum(min(want.tp, sum(p >= want.p for p in have)) for want, have in pairs)

    if len(numbers) > 5:
        # Too many orders to try them all: one by one.
        free, found = list(numbers), {}
        for variant in chosen:
            best = max(free, key=lambda number: (suits(variant, number), -number))
            free.remove(best)
            found[best] = variant.wants
        return dict(sorted(found.items()))
    best_order = max(
        permutations(numbers, len(chosen)),
        key=lambda order: sum(map(suits, chosen, order)),
    )
    pairs = zip(best_order, chosen, strict=True)
    return {number: variant.wants for number, variant in sorted(pairs, key=lambda x: x[0])}
