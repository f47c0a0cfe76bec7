"""Layouts of a large cluster that differ from the base plan only where devices are dead or slow.

A damaged stage may keep any degree that divides the model, on its own devices or on free ones:
those on standby, those that other damaged stages give up, and those of replicas that are given up.
It may be split: what is left of four devices is a stage of two and another of one. It may also be
left out, its layers spread over the rest of its replica. Healthy stages and healthy replicas stay
as they are, so the search grows with the damage, not with the cluster.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

from resihp_ext.plan.parts import Stage
from resihp_ext.scheduler.layouts import Layouts
from resihp_ext.scheduler.maps import Rated, Site, Sites
from resihp_ext.scheduler.predict import Ends
from resihp_ext.scheduler.prices import Group
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.shares import Share, estimated
from resihp_ext.scheduler.wants import Choice, Want, demand, supply

HEALTHY = 0.99
"""A device this fast is not worth a change."""
VARIANTS = 48
"""Most ways that are looked at for one replica."""
BEAM = 48
"""Most partial layouts that are carried from replica to replica."""
WISHES, SPLITS = 6, 2
"""Most ways to keep a damaged stage, and to split it."""
Stages = tuple[Choice, ...]
"""What a stage becomes: itself, none, or two."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A layout without devices."""

    pipeline_s: float
    """A bound, transfers left out, as long as micro-batches stay in their replicas."""
    wishes: dict[int, tuple[Choice, ...]]
    ends_s: float
    """About the time of SYNC and STEP."""
    effort: float
    """About how many devices must take over something new."""


@dataclass(frozen=True, slots=True)
class _Variant:
    """What a replica may become; without stages it is given up."""

    choices: tuple[Choice, ...]
    needs: tuple[int, ...]
    """Free devices at each level of throughput; below zero: it sets some free."""
    rated: Rated | None
    effort: float = 0.0
    """See :class:`Sketch`."""


@dataclass(frozen=True, slots=True)
class _Partial:
    """Variants of the first replicas of the region."""

    chosen: tuple[_Variant, ...] = ()
    needs: tuple[int, ...] = ()
    speed: float = field(default=0.0)
    """Micro-batches a second, once the pipelines are full."""


class NearSearch:
    """The damaged part of a plan."""

    def __init__(
        self,
        problem: Problem,
        layouts: Layouts,
        damaged: Mapping[int, frozenset[int]],
    ) -> None:
        self._problem, self._layouts, self._damaged = problem, layouts, damaged
        self._ends = Ends(problem)
        self._shards = len(problem.base.replicas)
        self._touched = sorted(damaged)
        base = problem.base.replicas
        p_of = problem.p_of
        used = {rank for one in base for rank in one.ranks}
        self.free = [d.rank for d in problem.cluster.alive if d.rank not in used]
        for number, places in damaged.items():
            for place in sorted(places):
                ranks = base[number].stages[place].ranks
                self.free += [rank for rank in ranks if p_of[rank] > 0]
        around = {r for number in damaged for r in base[number].ranks if p_of[r] > 0}
        self._levels = sorted({p_of[r] for r in {*around, *self.free}}, reverse=True)
        self._there = supply(problem, self.free, self._levels)
        node_of = problem.cluster.node_of
        self._apart = len({node_of[one.stages[0].ranks[0]] for one in base}) > 1

    def sketches(self) -> list[Sketch]:
        """The most promising layouts first."""
        options = [self._variants(number) for number in self._touched]
        found = []
        for state in self._grown(options):
            shares = self._layouts.fixed_shares()
            for one in state.chosen:
                if one.rated:
                    about_s = one.rated.at_least_s
                    shares.append(Share(1, about_s, about_s, one.rated.each_s))
            if shares:
                seconds, _ = estimated(shares, self._problem.current.micro_batches)
                pairs = list(zip(self._touched, state.chosen, strict=True))
                wishes = {number: one.choices for number, one in pairs if one.choices}
                effort = sum(one.effort for one in state.chosen)
                found.append(Sketch(seconds, wishes, self._ends_s(state.chosen), effort))
        # Some times are equal as far as an estimate can say.
        return sorted(
            found, key=lambda one: (float(f"{one.pipeline_s + one.ends_s:.3g}"), one.effort)
        )

    def _ends_s(self, chosen: Sequence[_Variant]) -> float:
        """About the time of SYNC and STEP."""
        rated = [one.rated for one in chosen if one.rated]
        most = max([self._layouts.fixed_parameters, *(one.parameters for one in rated)])
        untouched = len(self._problem.base.replicas) - len(self._touched)
        return self._ends.about_s(most, untouched + len(rated), apart=self._apart)

    def freed(self, sketch: Sketch) -> list[int]:
        """Devices that a layout may hand out."""
        base, p_of = self._problem.base.replicas, self._problem.p_of
        given_up = [number for number in self._touched if number not in sketch.wishes]
        more = [rank for number in given_up for rank in base[number].ranks if p_of[rank] > 0]
        return sorted({*self.free, *more})

    def _grown(self, options: Sequence[Sequence[_Variant]]) -> list[_Partial]:
        """Beam search, replica after replica."""
        # What replicas further on may still set free.
        later = [tuple(0 for _ in self._levels)]
        for variants in reversed(options):
            least = (min(column) for column in zip(*(v.needs for v in variants), strict=True))
            later.append(tuple(a - min(0, b) for a, b in zip(later[-1], least, strict=True)))
        later.reverse()
        states = [_Partial(needs=later[-1])]
        for variants, hope in zip(options, later[1:], strict=True):
            grown = []
            for state in states:
                for one in variants:
                    needs = tuple(a + b for a, b in zip(state.needs, one.needs, strict=True))
                    room = zip(needs, self._there, hope, strict=True)
                    if any(need > have + more for need, have, more in room):
                        continue
                    speed = state.speed + (1 / one.rated.each_s if one.rated else 0.0)
                    grown.append(_Partial((*state.chosen, one), needs, speed))
            grown.sort(key=lambda state: (-state.speed, state.needs))
            states = grown[:BEAM]
        return states

    def _variants(self, number: int) -> list[_Variant]:
        one = self._problem.base.replicas[number]
        options = [self._choices(number, place) for place in range(len(one.stages))]
        intact = [rank for ways in options if len(ways) == 1 for rank in _ranks(ways[0])]
        released = supply(self._problem, intact, self._levels)
        found = [_Variant((), tuple(-n for n in released), None, 0.0)]
        for choices in self._products(options):
            sites = self._sites(choices)
            maps = self._layouts.maps.of(sites, self._shards) if sites else ()
            if maps:
                effort = self._effort(number, choices)
                found.append(_Variant(choices, demand(choices, self._levels), maps[0], effort))
        found.sort(key=lambda v: v.rated.each_s if v.rated else 0.0)
        return found[:VARIANTS]

    def _effort(self, number: int, choices: Sequence[Choice]) -> float:
        """Devices from elsewhere, half of those whose part of the matrices changes, and all that
        must take over the layers of a stage that is left out."""
        stages, p_of = self._problem.base.replicas[number].stages, self._problem.p_of
        if len(choices) != len(stages):
            return 2.0 * max(stage.tp for stage in stages)
        effort = 0.0
        for stage, one in zip(stages, choices, strict=True):
            if isinstance(one, Want):
                own = sum(p_of[rank] >= one.p for rank in stage.ranks)
                effort += max(0, one.tp - own) + (one.tp != stage.tp) * one.tp / 2
        return effort

    def _products(self, options: Sequence[Sequence[Stages]]) -> list[Stages]:
        """Ways to choose for every stage; with much damage, only the best few for each."""
        while True:
            count = 1
            for choices in options:
                count *= len(choices)
            longest = max(map(len, options))
            if count <= 2 * VARIANTS or longest <= 2:
                break
            # The worst choice of a stage is its last.
            options = [c[:-1] if len(c) == longest else c for c in options]
        chosen = (
            tuple(chain.from_iterable(ways))
            for ways, _ in zip(product(*options), range(2 * VARIANTS), strict=False)
        )
        return list(dict.fromkeys(chosen))

    def _choices(self, number: int, place: int) -> list[Stages]:
        """For a damaged stage wishes, the fastest first, and to leave it out."""
        one = self._problem.base.replicas[number]
        stage = one.stages[place]
        if place not in self._damaged[number]:
            return [(stage.ranks,)]
        alike = [x for x in self._problem.base.replicas if len(x.stages) == len(one.stages)]
        widest = max(x.stages[place].tp for x in alike)
        own = {self._problem.p_of[rank] for rank in stage.ranks}
        levels = [p for p in self._levels if p in own or p == self._levels[0]]
        wants = [Want(tp, p) for tp in self._problem.valid_tps(widest) for p in levels]
        timed = [(self._layer_s(one), one) for one in wants]
        kept = [
            (seconds, one)
            for seconds, one in timed
            if not any(
                other != one and other.tp <= one.tp and other.p <= one.p and faster <= seconds
                for faster, other in timed
            )
        ]
        best: list[tuple[float, Stages]] = [(s, (want,)) for s, want in sorted(kept)[:WISHES]]
        best += self._splits(stage)
        best.sort(key=lambda item: (item[0], len(item[1])))
        ways = [stages for _, stages in best]
        return [*ways, ()] if len(one.stages) > 1 else ways

    def _splits(self, stage: Stage) -> list[tuple[float, Stages]]:
        """Two stages of what is left of one, each of equal devices as far as that goes; seconds of
        a layer on both together."""
        left = sorted((self._problem.p_of[rank] for rank in stage.ranks), reverse=True)
        left = [p for p in left if p > 0]
        degrees = self._problem.valid_tps(stage.tp)
        found = []
        for one, other in product(degrees, degrees):
            if other > one or one + other > len(left):
                continue
            wants = (Want(one, left[one - 1]), Want(other, left[one + other - 1]))
            seconds = 1 / sum(1 / self._layer_s(want) for want in wants)
            found.append((seconds, wants))
        return [(s, wants) for s, wants in sorted(found)[:SPLITS]]

    def _layer_s(self, want: Want) -> float:
        sites = (Site(want.tp, want.p, False), Site(1, 1.0, False))
        depths = (1, self._problem.shape.num_layers - 1)
        return sum(self._layouts.maps.pairs(sites, depths)[0])

    def _sites(self, choices: Sequence[Choice]) -> Sites:
        return tuple(
            Site(one.tp, one.p, False) if isinstance(one, Want) else self._layouts.sites([one])[0]
            for one in choices
        )


def _ranks(stages: Stages) -> Group:
    return tuple(rank for one in stages if isinstance(one, tuple) for rank in one)


def damaged_places(problem: Problem) -> dict[int, frozenset[int]]:
    """For each replica with damage the stages that have a dead or slow device, or that are narrower
    than the same stage elsewhere while devices stand by."""
    base, p_of = problem.base.replicas, problem.p_of
    sick = {rank for rank, p in p_of.items() if p < HEALTHY}
    used = {rank for one in base for rank in one.ranks}
    widest: dict[tuple[int, int], int] = {}
    if any(p_of[rank] >= HEALTHY for rank in p_of.keys() - used):
        for one in base:
            for place, stage in enumerate(one.stages):
                key = (len(one.stages), place)
                widest[key] = max(widest.get(key, 0), stage.tp)
    found = {}
    for number, one in enumerate(base):
        places = frozenset(
            place
            for place, stage in enumerate(one.stages)
            if not sick.isdisjoint(stage.ranks)
            or stage.tp < widest.get((len(one.stages), place), 0)
        )
        if places:
            found[number] = places
    return found
