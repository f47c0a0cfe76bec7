"""Oobleck's pipeline templates: how layers are cut for so many nodes, and which sizes cover what.

Source: BASELINES 2.1 to 2.4. A template's time is ``T1 + T2 + T3``: with ``w`` the seconds of
stages and ``k`` the slowest one (the last of equal ones), ``T1 = sum(w)``,
``T2 = (Nb - S + k - 1) * w[k]``, ``T3 = sum(w[k:])``, and ``Nb = 4 S`` micro-batches. The search is
exact: for every range of layers that could be the slowest stage, and every place of it, the layers
on both sides must fit into the stages there without one that is slower. (The artifact keeps one
best answer for each part of the problem, which is not exact.)

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

WORSE_RATIO = 1.5
"""Cuts beyond that are not looked for where better ones do not fit into memory."""
Cut = tuple[int, ...]
"""Layers of each stage."""


@dataclass(frozen=True, slots=True)
class Slowest:
    """A family of cuts with the same time: those with this slowest stage."""

    seconds: float
    place: int
    """Of the stage, from 0."""
    layers: tuple[int, int]
    limit_s: float
    """What no other stage exceeds."""


def step_s(stage_s: Sequence[float], micro_batches: int) -> float:
    """``T1 + T2 + T3`` of a pipeline with stages of these seconds."""
    slowest = max(range(len(stage_s)), key=lambda at: (stage_s[at], at))
    waits = micro_batches - len(stage_s) + slowest
    return sum(stage_s) + waits * stage_s[slowest] + sum(stage_s[slowest:])


def families(layer_s: Sequence[float], stages: int, micro_batches: int) -> list[Slowest]:
    """The best first, with all that are at most :data:`WORSE_RATIO` times as slow.

    Args:
        layer_s: Seconds of each layer; what comes before the first and after the last belongs to
            these.
        stages: At most as many as layers.
    """
    count = len(layer_s)
    ends = [0.0, *accumulate(layer_s)]
    found: list[Slowest] = []
    best_s = inf
    ranges = [(ends[b] - ends[a], a, b) for a in range(count) for b in range(a + 1, count + 1)]
    for slowest_s, low, high in sorted(ranges):
        if slowest_s * stages < ends[-1] * (1 - 1e-9):
            continue  # it would not be the slowest
        if ends[-1] + (micro_batches - stages) * slowest_s > WORSE_RATIO * best_s:
            break
        before = _least(ends, 0, low, slowest_s * (1 + 1e-12))
        # Of equal stages the last one counts: behind it all are faster.
        after = _least(ends, high, count, slowest_s * (1 - 1e-12))
        for place in range(stages):
            rest = stages - 1 - place
            if not (before <= place <= low and after <= rest <= count - high):
                continue
            waits = micro_batches - stages + place
            seconds = ends[-1] + waits * slowest_s + ends[-1] - ends[low]
            found.append(Slowest(seconds, place, (low, high), slowest_s))
            best_s = min(best_s, seconds)
    return sorted(found, key=lambda one: (one.seconds, one.place, one.layers))


def cut(layer_s: Sequence[float], stages: int, family: Slowest) -> Cut:
    """A cut of a family: the sides as even as they can be."""
    low, high = family.layers
    first = _even(layer_s[:low], family.place, family.limit_s)
    last = _even(layer_s[high:], stages - 1 - family.place, family.limit_s * (1 - 1e-12))
    return (*first, high - low, *last)


def best_cut(
    layer_s: Sequence[float],
    stages: int,
    micro_batches: int,
    fits: Callable[[Cut], bool] = lambda _: True,
) -> tuple[float, Cut] | None:
    """The fastest cut that fits into memory; None if there is none."""
    if not 1 <= stages <= len(layer_s):
        return None
    for family in families(layer_s, stages, micro_batches):
        layers = cut(layer_s, stages, family)
        if fits(layers):
            return family.seconds, layers
    return None


def _least(ends: Sequence[float], low: int, high: int, limit_s: float) -> int | float:
    """Fewest stages for some layers, none slower than a limit: each takes as many as it can."""
    stages = 0
    while low < high:
        reach = bisect_right(ends, ends[low] + limit_s) - 1
        if reach <= low:
            return inf
        low, stages = reach, stages + 1
    return stages


def _even(layer_s: Sequence[float], stages: int, limit_s: float) -> Cut:
    """Layers over stages, the slowest of them as fast as it can be."""
    if not stages:
        return ()
    count = len(layer_s)
    each, more = divmod(count, stages)
    for sizes in (
        tuple(each + (at < more) for at in range(stages)),
        tuple(each + (at >= stages - more) for at in range(stages)),
    ):
        edges = [0, *accumulate(sizes)]
        if all(sum(layer_s[a:b]) <= limit_s * (1 + 1e-9) for a, b in pairwise(edges)):
            return sizes
    return _greedy(layer_s, stages, limit_s)


def _greedy(layer_s: Sequence[float], stages: int, limit_s: float) -> Cut:
    """As many as a stage can take, but one for each stage that follows."""
    sizes, at = [], 0
    for stage in range(stages):
        size, sum_s = 0, 0.0
        while len(layer_s) - at > stages - 1 - stage and sum_s + layer_s[at] <= limit_s * (
            1 + 1e-9
        ):
            sum_s, size, at = sum_s + layer_s[at], size + 1, at + 1
        sizes.append(size)
    return tuple(sizes)


def sums(sizes: Sequence[int], total: int, least: int) -> Iterator[tuple[int, ...]]:
    """All ways to make a total of sizes, at least so many of them, each way in ascending order."""

    def more(first: int, left: int, chosen: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        if left == 0 and len(chosen) >= least:
            yield chosen
        for at in range(first, len(sizes)):
            if sizes[at] <= left:
                yield from more(at, left - sizes[at], (*chosen, sizes[at]))

    yield from more(0, total, ())


def covered(smallest: int, spare: int, nodes: int) -> bool:
    """Whether so many nodes hold ``spare + 1`` pipelines of sizes ``smallest`` to twice that less
    one: for every number of pipelines the sums are an interval, and the intervals meet."""
    sizes = range(smallest, 2 * smallest)
    return next(sums(sizes, nodes, spare + 1), None) is not None
