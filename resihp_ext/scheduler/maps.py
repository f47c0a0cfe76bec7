"""Layer maps of one replica: all of them where few, else the best by a bound.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import comb
from operator import le

from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.scheduler.clock import Pair
from resihp_ext.scheduler.layers import Depths, balanced, compositions, neighbours_of
from resihp_ext.scheduler.prices import StageKind
from resihp_ext.scheduler.problem import Problem

FEW = 40
"""Maps that are all looked at."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a stage runs on, as far as it matters for its speed."""

    tp: int
    p: float
    across: bool


Sites = tuple[Site, ...]
"""The stages of a replica."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What one stage says of the time of a step."""

    above_s: float
    """One micro-batch, both ways, through the stages before it."""
    below_s: float
    """And through those after it."""
    pair: Pair
    limit: int
    """Micro-batches that it may have in flight."""

    def at_least_s(self, micro_batches: int) -> float:
        """A lower bound, transfers left out.

        The stage does all its work between the first forward and the last backward of the stages
        before it. It waits for its first backward, when it can only do forwards, and before its
        last one, when it can only do backwards, each time no more than may be in flight. These are
        two waits, unless all micro-batches fit in flight.
        """
        forward, backward = self.pair
        others = min(self.limit, micro_batches) - 1
        first = max(0.0, self.below_s - others * forward)
        last = max(0.0, self.below_s - others * backward)
        waits = first + last if micro_batches > self.limit else max(first, last)
        return self.above_s + micro_batches * (forward + backward) + waits


@dataclass(frozen=True, slots=True)
class Rated:
    """A layer map with what can be said of its times without playing a step."""

    depths: Depths
    bounds: tuple[Bound, ...]
    parameters: int
    """Of the rank that holds most: SYNC and STEP take as long as it does."""

    def at_least_s(self, micro_batches: int) -> float:
        """A lower bound, and where transfers are short close to the time itself."""
        return max(bound.at_least_s(micro_batches) for bound in self.bounds)

    @property
    def each_s(self) -> float:
        """The slowest stage: what each further micro-batch costs in a full pipeline."""
        return max(sum(bound.pair) for bound in self.bounds)


class Maps:
    """Remembers the maps of the replicas it was asked about."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[tuple[Sites, int], tuple[Rated, ...]] = {}
        self._limits: dict[tuple[Sites, int], list[int]] = {}
        self._pairs: dict[tuple[Site, bool, bool], dict[int, Pair]] = {}
        self._rated: dict[tuple[Sites, Depths], Rated] = {}

    def of(self, sites: Sites, shards: int) -> tuple[Rated, ...]:
        """Maps that fit in memory; the one with the fastest bottleneck first.

        Args:
            shards: Replicas that share the optimizer's state, if the policy says so.
        """
        key = (sites, shards)
        if key not in self._known:
            self._known[key] = tuple(self._find(sites, shards))
        return self._known[key]

    def complete(self, sites: Sites) -> bool:
        """Whether :meth:`of` gives all maps."""
        return comb(self._problem.shape.num_layers - 1, len(sites) - 1) <= FEW

    def _find(self, sites: Sites, shards: int) -> list[Rated]:
        num_layers, limits = self._problem.shape.num_layers, self.limits(sites, shards)
        best = balanced(num_layers, lambda i, n: sum(self._pair(sites, i, n)), limits)
        if best is None:
            return []
        if not self.complete(sites):
            return [self.rated(sites, best)]
        others = [depths for depths in compositions(num_layers, limits) if depths != best]
        return [self.rated(sites, depths) for depths in (best, *others)]

    def limits(self, sites: Sites, shards: int) -> list[int]:
        """Most layers of each stage."""
        key = (sites, shards)
        if key not in self._limits:
            count, total = len(sites), self._problem.current.micro_batches
            self._limits[key] = [
                self._problem.most_layers(
                    tp=site.tp,
                    place=place,
                    stages=count,
                    shards=shards,
                    in_flight=min(count - place, total),
                )
                for place, site in enumerate(sites)
            ]
        return self._limits[key]

    def fits(self, sites: Sites, depths: Depths, shards: int) -> bool:
        """Whether a map is one of these stages and fits in memory."""
        limits = self.limits(sites, shards)
        return len(depths) == len(limits) and all(map(le, depths, limits))

    def near(self, sites: Sites, rated: Rated, micro_batches: int, shards: int) -> list[Rated]:
        """Maps in which one of the two stages that hold the step up most has a layer less."""
        bounds = [bound.at_least_s(micro_batches) for bound in rated.bounds]
        sources = sorted(range(len(bounds)), key=lambda place: -bounds[place])[:2]
        limits = self.limits(sites, shards)
        return [
            self.rated(sites, other)
            for source in sources
            for other in neighbours_of(rated.depths, source, limits)
        ]

    def _pair(self, sites: Sites, place: int, depth: int) -> Pair:
        site = sites[place]
        first, last = place == 0, place == len(sites) - 1
        known = self._pairs.setdefault((site, first, last), {})
        if depth not in known:
            kind = StageKind(depth, site.tp, site.p, first, last, site.across)
            known[depth] = self._problem.prices.pair(kind)
        return known[depth]

    def pairs(self, sites: Sites, depths: Depths) -> list[Pair]:
        """Forward and backward of each stage."""
        return [self._pair(sites, place, depth) for place, depth in enumerate(depths)]

    def rated(self, sites: Sites, depths: Depths) -> Rated:
        """Bounds of one map."""
        key = (sites, depths)
        if key not in self._rated:
            tps = [site.tp for site in sites]
            most = most_parameters(self._problem.shape, depths, tps)
            self._rated[key] = Rated(depths, bounds_of(self.pairs(sites, depths)), most)
        return self._rated[key]


def bounds_of(pairs: Sequence[Pair]) -> tuple[Bound, ...]:
    """The bound of every stage of a replica."""
    work = [forward + backward for forward, backward in pairs]
    above = [0.0, *accumulate(work)]
    return tuple(
        Bound(above[place], above[-1] - above[place + 1], pair, len(pairs) - place)
        for place, pair in enumerate(pairs)
    )


def most_parameters(shape: ModelShape, depths: Depths, tps: Sequence[int]) -> int:
    """Elements on the rank of a replica that holds most."""
    last = len(depths) - 1
    return max(
        shape.rank_parameters(depth=depth, tp=tp, first=place == 0, last=place == last)
        for place, (depth, tp) in enumerate(zip(depths, tps, strict=True))
    )
