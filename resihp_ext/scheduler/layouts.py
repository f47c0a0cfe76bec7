"""From groups of devices to a plan: layer maps, micro-batch shares, the order of ranks.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from resihp_ext.plan.plan import Instance, Plan, Replica, Route, Stage
from resihp_ext.scheduler.clock import Hop, StageTimes
from resihp_ext.scheduler.layers import Depths, edges
from resihp_ext.scheduler.maps import Maps, Rated, Site, Sites, bounds_of, most_parameters
from resihp_ext.scheduler.movement import arranged
from resihp_ext.scheduler.predict import Ends, Predictor
from resihp_ext.scheduler.prices import Group
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.shares import Share, balanced_shares, dealt_counts

Groups = Mapping[int, tuple[Group, ...]]
"""Stages of replicas, by their number in the base plan."""
LayerMaps = Mapping[int, Depths]
"""For each of these replicas the layers of its stages."""
Key = tuple[Sites, tuple[Hop, ...], int]
"""All that decides how fast a replica can be; last, how many share the optimizer's state."""

REFINE = 6
"""Neighbouring layer maps that are played out in each round of a refinement."""


@dataclass(frozen=True, slots=True)
class _Class:
    """Equal replicas."""

    numbers: tuple[int, ...]
    key: Key | None
    """None for replicas that stay as they are."""
    share: Share
    depths: Depths | None = None
    """A layer map that is demanded of them."""


class Layouts:
    """Builds the best plan on given groups; remembers replicas."""

    def __init__(self, problem: Problem, predictor: Predictor, untouched: Sequence[int]) -> None:
        self._problem, self._predictor = problem, predictor
        self.maps = Maps(problem)
        self._best: dict[tuple[Key, int], tuple[float, Rated]] = {}
        self.fixed_parameters = 0
        """Elements on the rank of the untouched replicas that holds most."""
        alike: dict[object, list[int]] = {}
        for number in untouched:
            parts = predictor.parts(problem.base.replicas[number])
            alike.setdefault(parts, []).append(number)
        self._fixed = [self._as_they_are(numbers) for numbers in alike.values()]

    def _as_they_are(self, numbers: Sequence[int]) -> _Class:
        one = self._problem.base.replicas[numbers[0]]
        bounds = bounds_of([times.run for times in self._predictor.parts(one)[0]])
        depths = tuple(stage.depth for stage in one.stages)
        most = most_parameters(self._problem.shape, depths, [stage.tp for stage in one.stages])
        rated = Rated(depths, bounds, most)
        share = Share(
            len(numbers), lambda m: self._predictor.chain_s(one, m), rated.at_least_s, rated.each_s
        )
        self.fixed_parameters = max(self.fixed_parameters, most)
        return _Class(tuple(numbers), None, share)

    def fixed_shares(self) -> list[Share]:
        """The replicas that stay as they are."""
        return [one.share for one in self._fixed]

    def above_bound(self) -> float:
        """Time over bound of the untouched replicas: what transfers add, about everywhere."""
        replicas = len(self._problem.base.replicas)
        each = -(-self._problem.current.micro_batches // replicas)
        ratios = (one.share.seconds(each) / one.share.about_s(each) for one in self._fixed)
        return min(ratios, default=1.0)

    def sites(self, groups: Sequence[Group]) -> Sites:
        """What the stages of a replica run on."""
        prices = self._problem.prices
        return tuple(Site(len(g), prices.slowest(g), prices.across(g)) for g in groups)

    def _key(self, groups: Sequence[Group], shards: int) -> Key:
        hop = self._problem.prices.hop
        return self.sites(groups), tuple(hop(a, b) for a, b in pairwise(groups)), shards

    def _played_s(self, key: Key, rated: Rated, micro_batches: int) -> float:
        pairs = self.maps.pairs(key[0], rated.depths)
        stages = tuple(StageTimes(pair, pair) for pair in pairs)
        return self._predictor.timed(stages, key[1], micro_batches)

    def fastest(self, key: Key, micro_batches: int) -> tuple[float, Rated]:
        """The best layer map for so many micro-batches, and its time."""
        asked = (key, micro_batches)
        if asked not in self._best:
            maps = self.maps.of(key[0], key[2])
            order = sorted((one.at_least_s(micro_batches), place) for place, one in enumerate(maps))
            best = (self._played_s(key, maps[0], micro_batches), 0)
            for bound_s, place in order:
                if place and bound_s < best[0]:
                    best = min(best, (self._played_s(key, maps[place], micro_batches), place))
            self._best[asked] = (best[0], maps[best[1]])
        return self._best[asked]

    def refine(self, key: Key, micro_batches: int) -> None:
        """Looks for a better map around the best known one, where not all were looked at."""
        if self.maps.complete(key[0]):
            return
        found_s, rated = self.fastest(key, micro_batches)
        while True:
            near = sorted(
                self.maps.near(key[0], rated, micro_batches, key[2]),
                key=lambda one: (one.at_least_s(micro_batches), one.depths),
            )
            able = [one for one in near if one.at_least_s(micro_batches) < found_s][:REFINE]
            tried = [(self._played_s(key, one, micro_batches), one) for one in able]
            if not tried:
                break
            best_s, best = min(tried, key=lambda item: (item[0], item[1].depths))
            if best_s >= found_s * (1 - 1e-6):
                break
            found_s, rated = best_s, best
        self._best[key, micro_batches] = (found_s, rated)

    def timed_s(self, groups: Groups, depths: LayerMaps | None = None) -> float:
        """Pipeline time of the best plan on these groups; infinite if nothing fits."""
        classes = self._classes(groups, depths)
        if not classes:
            return inf
        total = self._problem.current.micro_batches
        return balanced_shares([one.share for one in classes], total)[1]

    def plan(
        self, groups: Groups, depths: LayerMaps | None = None, *, refine: bool = False
    ) -> Plan | None:
        """The best plan on these groups beside the untouched replicas; None if nothing fits.

        Args:
            depths: Their layer maps. Default: the fastest for each.
            refine: Whether to spend more time on layer maps.
        """
        classes = self._classes(groups, depths)
        if not classes:
            return None
        total = self._problem.current.micro_batches
        shares = [one.share for one in classes]
        most, limit_s = balanced_shares(shares, total)
        if refine:
            for one, micro_batches in zip(classes, most, strict=True):
                if one.key and one.share.seconds(micro_batches) >= limit_s * (1 - 1e-6):
                    self.refine(one.key, micro_batches)
            most, limit_s = balanced_shares(shares, total)
        counts = dealt_counts(shares, most, total)
        return self._assembled(classes, groups, counts, limit_s)

    def ends_s(self, groups: Groups, depths: LayerMaps, ends: Ends) -> float:
        """About the time of SYNC and STEP, if all replicas are among the groups."""
        node_of, shape = self._problem.cluster.node_of, self._problem.shape
        stages = [
            (layers, len(group), {node_of[rank] for rank in group})
            for number, own in groups.items()
            for group, layers in zip(own, edges(depths[number]), strict=True)
        ]
        found = 0.0
        for (low, high), tp, _ in stages:
            owners = (nodes for (a, b), _, nodes in stages if a < high and low < b)
            parameters = shape.rank_parameters(
                depth=high - low, tp=tp, first=low == 0, last=high == shape.num_layers
            )
            apart = len(set().union(*owners)) > 1
            found = max(found, ends.about_s(parameters, len(groups), apart=apart))
        return found

    def _classes(self, groups: Groups, depths: LayerMaps | None) -> list[_Class]:
        """Equal replicas together; none at all if a replica cannot hold the model."""
        shards = sum(len(one.numbers) for one in self._fixed) + len(groups)
        keyed: dict[tuple[Key, Depths | None], list[int]] = {}
        for number, own in groups.items():
            key = self._key(own, shards)
            demanded = depths[number] if depths else None
            if not self.maps.of(key[0], shards):
                return []
            if demanded and not self.maps.fits(key[0], demanded, shards):
                return []
            keyed.setdefault((key, demanded), []).append(number)
        return [*self._fixed, *(self._movable(*key, numbers) for key, numbers in keyed.items())]

    def _movable(self, key: Key, depths: Depths | None, numbers: Sequence[int]) -> _Class:
        rated = self.maps.rated(key[0], depths) if depths else self.maps.of(key[0], key[2])[0]

        def seconds(micro_batches: int) -> float:
            if depths:
                return self._played_s(key, rated, micro_batches)
            return self.fastest(key, micro_batches)[0]

        share = Share(len(numbers), seconds, rated.at_least_s, rated.each_s)
        return _Class(tuple(numbers), key, share, depths)

    def _assembled(
        self,
        classes: Sequence[_Class],
        groups: Groups,
        counts: Sequence[Sequence[int]],
        limit_s: float,
    ) -> Plan:
        built: dict[int, tuple[Replica, int]] = {}
        for one, mine in zip(classes, counts, strict=True):
            for number, micro_batches in zip(one.numbers, mine, strict=True):
                replica = self._problem.base.replicas[number]
                if one.key is not None:
                    best = self._depths(number, one, micro_batches, limit_s)
                    replica = self._replica(groups[number], best)
                built[number] = (replica, micro_batches)
        order = sorted(built)
        return self._problem.current.next_version(
            devices=self._problem.cluster.devices,
            replicas=tuple(built[number][0] for number in order),
            routes=straight_routes(
                [built[number][0] for number in order], [built[number][1] for number in order]
            ),
        )

    def _depths(self, number: int, one: _Class, micro_batches: int, limit_s: float) -> Depths:
        """The layers it had, unless others make the step shorter: nothing moves in vain."""
        assert one.key is not None
        if one.depths is not None:
            return one.depths
        sites, _, shards = one.key
        before = tuple(stage.depth for stage in self._problem.base.replicas[number].stages)
        if self.maps.fits(sites, before, shards):
            kept = self.maps.rated(sites, before)
            if not micro_batches or self._played_s(one.key, kept, micro_batches) <= limit_s:
                return before
        return self.fastest(one.key, max(1, micro_batches))[1].depths

    def _replica(self, own: Sequence[Group], depths: Depths) -> Replica:
        return Replica(
            stages=tuple(
                Stage(ranks=arranged(self._problem, group, layers), layers=layers)
                for group, layers in zip(own, edges(depths), strict=True)
            )
        )


def straight_routes(replicas: Sequence[Replica], counts: Sequence[int]) -> tuple[Route, ...]:
    """Micro-batches dealt out in turn, until a replica has its share."""
    left = list(counts)
    ways = [
        tuple(Instance(replica=number, stage=place) for place in range(len(one.stages)))
        for number, one in enumerate(replicas)
    ]
    routes: list[Route] = []
    while any(left):
        for number, way in enumerate(ways):
            if left[number]:
                left[number] -= 1
                routes.append(way)
    return tuple(routes)
