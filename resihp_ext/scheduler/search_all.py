"""Layouts of a small cluster: all that a lower bound does not exclude.

The limit on the time of a step is raised little by little, and of every set of replicas that may be
faster the time is taken, so that good layouts come first and soon exclude the rest.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Protocol

from resihp_ext.scheduler.decision import Judge
from resihp_ext.scheduler.layers import Depths
from resihp_ext.scheduler.layouts import Groups, Layouts
from resihp_ext.scheduler.lineups import Lineup, Lineups, most_together
from resihp_ext.scheduler.maps import Rated
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.search_cross import CrossSearch
from resihp_ext.scheduler.wants import ACROSS

MOST = 200_000
"""Layer maps of all possible replicas together beyond which nothing is searched."""
RAISE = 1.05
"""The limit grows by this factor."""
VISITS = 300
"""Most layouts that are timed."""
STEPS = 1_000_000
"""Most sets of replicas that are looked at, all limits together."""
LIMIT_STEPS = 100_000
"""And so many of one size under one limit: a larger one may find what a smaller one misses."""
PRODUCTS = 150
"""Most layer maps of a set of replicas that are looked at, each replica with its own; with more,
only those that all replicas share."""


class Whole:
    """Search of a whole cluster."""

    def __init__(self, problem: Problem, judge: Judge, layouts: Layouts) -> None:
        self._problem, self._judge, self._layouts = problem, judge, layouts
        self._lineups = Lineups(problem, layouts.maps)
        self._total = problem.current.micro_batches
        self._visits = self._steps = 0

    def run(self) -> None:
        """Offers what is found; nothing if there is too much to look at."""
        if self._lineups.how_many_maps() > MOST:
            self._lineups.shallow()
        if self._lineups.how_many_maps() > MOST:
            return
        lineups = list(self._lineups.all(self._judge.limit_s()))
        if not lineups:
            return
        limit_s, most_s = RAISE * self._least_s(lineups), self._most_s(lineups)
        seen: set[tuple[int, ...]] = set()
        while self._visits < VISITS and self._steps < STEPS:
            limit_s = min(limit_s, self._judge.limit_s())
            new = sorted(self._sets(lineups, limit_s) - seen)
            seen.update(new)
            sets = [[lineups[index] for index in one] for one in new]
            bounds = [_shared_s(one, self._total) + self._lineups.ends_s(one) for one in sets]
            for place in sorted(range(len(sets)), key=lambda place: (bounds[place], place)):
                if bounds[place] >= self._judge.limit_s() or self._visits >= VISITS:
                    break
                self._visit(sets[place])
            if limit_s >= min(most_s, self._judge.limit_s()):
                break
            limit_s *= RAISE
        CrossSearch(self._problem, self._judge, self._layouts, self._lineups).run(lineups)

    def _least_s(self, lineups: Sequence[Lineup]) -> float:
        """If all replicas could be like the fastest."""
        each = -(-self._total // self._lineups.replicas)
        about_s = self._lineups.ends.about_s
        return min(
            one.at_least_s(each) + about_s(one.parameters, 1, apart=False) for one in lineups
        )

    def _most_s(self, lineups: Sequence[Lineup]) -> float:
        """No bound is larger: from this limit on there is nothing new."""
        about_s, largest = self._lineups.ends.about_s, max(one.parameters for one in lineups)
        kinds = product(range(1, self._lineups.replicas + 1), (False, True))
        ends_s = max(about_s(largest, count, apart=apart) for count, apart in kinds)
        return ends_s + max(one.at_least_s(self._total) for one in lineups)

    def _sets(self, lineups: Sequence[Lineup], limit_s: float) -> set[tuple[int, ...]]:
        """Replicas that may do all micro-batches, SYNC and STEP within the limit."""
        everything = range(len(lineups))
        about_s = self._lineups.ends.about_s
        by_nodes: dict[tuple[int, int], list[int]] = {}
        for index, one in enumerate(lineups):
            by_nodes.setdefault(one.ends, []).append(index)
        found: set[tuple[int, ...]] = set()
        for count in range(1, self._lineups.replicas + 1):
            near = [about_s(one.parameters, count, apart=False) for one in lineups]
            left_s = [limit_s - ends_s for ends_s in near]
            if count == 1 or len(by_nodes) == 1:
                found |= self._grown(lineups, everything, count, left_s)
                continue
            for nodes, members in by_nodes.items():
                if ACROSS not in nodes:
                    found |= self._grown(lineups, members, count, left_s)
            # The others have first or last stages on different nodes.
            far = [about_s(one.at_ends, count, apart=True) for one in lineups]
            left_s = [limit_s - max(pair) for pair in zip(near, far, strict=True)]
            found |= self._grown(lineups, everything, count, left_s)
        return found

    def _grown(
        self, lineups: Sequence[Lineup], able: Sequence[int], count: int, left_s: Sequence[float]
    ) -> set[tuple[int, ...]]:
        """Sets of so many replicas that may do all micro-batches.

        Args:
            left_s: For each replica the time that is left for its pipeline.
        """
        within = [(lineups[index].within(left_s[index], self._total), index) for index in able]
        order = sorted((-most, index) for most, index in within if most)
        needs = [lineups[index].needs for _, index in order]
        sizes = [lineups[index].size for _, index in order]
        found: set[tuple[int, ...]] = set()
        total, signs, devices = self._total, self._lineups.signs, self._lineups.devices
        pairs = ((lineups[index].size, -minus) for minus, index in order)
        together = most_together(pairs, count, devices)
        last_step = min(STEPS, self._steps + LIMIT_STEPS)

        def grow(chosen: tuple[int, ...], start: int, done: int, left: int, free: int) -> None:
            missing = count - len(chosen)
            others = together[missing - 1]
            for place in range(start, len(order)):
                minus, index = order[place]
                self._steps += 1
                if done - minus * missing < total or self._steps > last_step:
                    break
                kept = free - sizes[place]
                if kept < 0 or others[kept] < max(0, total - done + minus):
                    continue
                rest = left - needs[place]
                if rest & signs != signs:
                    continue
                if missing > 1:
                    grow((*chosen, index), place, done - minus, rest, kept)
                else:
                    found.add(tuple(sorted((*chosen, index))))

        grow((), 0, 0, self._lineups.there, devices)
        return found

    def _visit(self, chosen: Sequence[Lineup]) -> None:
        """Offers the layer maps with the fastest pipeline, and those that win by SYNC and STEP."""
        self._visits += 1
        groups = self._lineups.groups(chosen)
        if groups is None:
            return
        plan = self._layouts.plan(groups)
        if plan is not None:
            self._judge.offer("joint", plan)
        # In the order of numbers, as groups are.
        sites = [self._layouts.sites(own) for own in groups.values()]
        shards = len(groups)
        options = [self._layouts.maps.of(one, shards) for one in sites]
        if prod(map(len, options)) <= PRODUCTS:
            ways = list(product(*options))
        else:
            others = [{one.depths: one for one in maps} for maps in options[1:]]
            ways = [
                (first, *(maps[first.depths] for maps in others))
                for first in options[0]
                if all(first.depths in maps for maps in others)
            ]
        for way in ways:
            self._try_maps(groups, way)

    def _try_maps(self, groups: Groups, way: Sequence[Rated]) -> None:
        depths: Mapping[int, Depths] = {
            number: rated.depths for number, rated in zip(groups, way, strict=True)
        }
        ends_s = self._layouts.ends_s(groups, depths, self._lineups.ends)
        if _shared_s(way, self._total) + ends_s >= self._judge.limit_s():
            return
        if self._layouts.timed_s(groups, depths) + ends_s < self._judge.limit_s():
            plan = self._layouts.plan(groups, depths)
            if plan is not None:
                self._judge.offer("joint", plan)


class Bounded(Protocol):
    """A replica, with one layer map or with any."""

    def at_least_s(self, micro_batches: int) -> float:
        """Pipeline time of so many."""


def _shared_s(chosen: Sequence[Bounded], micro_batches: int) -> float:
    """The best split by the bounds."""
    counts = [0] * len(chosen)
    bounds = [one.at_least_s(1) for one in chosen]
    for _ in range(micro_batches):
        best = bounds.index(min(bounds))
        counts[best] += 1
        bounds[best] = chosen[best].at_least_s(counts[best] + 1)
    return max(one.at_least_s(n) for one, n in zip(chosen, counts, strict=True) if n)
