"""Layouts of a small cluster: all that a lower bound does not exclude.

A layout is, for each replica, a number of stages and for each stage a degree, the throughput of
its slowest device and a node; which devices these are follows. The limit on the time of a step is
raised little by little, and of every set of replicas that may be faster the time is taken, so that
good layouts come first and soon exclude the rest.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from math import comb, inf

from resihp_ext.plan.plan import Plan
from resihp_ext.scheduler.decision import Judge
from resihp_ext.scheduler.layouts import Layouts
from resihp_ext.scheduler.maps import Rated, Site
from resihp_ext.scheduler.predict import Ends
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.wants import ACROSS, Choice, Want, allocated

MOST = 40_000
"""Layer maps of all possible replicas together beyond which nothing is searched."""
RAISE = 1.02
"""The limit grows by this factor."""
VISITS = 500
"""Most layouts that are timed."""
STEPS = 100_000
"""Most sets of replicas that are looked at under one limit."""


@dataclass(frozen=True, eq=False)
class Lineup:
    """What one replica may be."""

    wants: tuple[Want, ...]
    needs: tuple[int, ...]
    """At each throughput, in all and on each node, the devices that it takes."""
    rated: tuple[Rated, ...]
    bounds_s: dict[int, float] = field(default_factory=dict)

    def at_least_s(self, micro_batches: int) -> float:
        """No layer map runs so many in less time."""
        if micro_batches not in self.bounds_s:
            bounds = (one.at_least_s(micro_batches) for one in self.rated)
            self.bounds_s[micro_batches] = min(bounds) if micro_batches else 0.0
        return self.bounds_s[micro_batches]

    def within(self, limit_s: float, most: int) -> int:
        """How many micro-batches it may do in less time."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.at_least_s(middle) < limit_s else (low, middle - 1)
        return low


class Whole:
    """Search of a whole cluster."""

    def __init__(self, problem: Problem, judge: Judge, layouts: Layouts) -> None:
        self._problem, self._judge, self._layouts = problem, judge, layouts
        self._ends = Ends(problem)
        alive = problem.cluster.alive
        self._alive = [device.rank for device in alive]
        self._nodes = sorted({device.node for device in alive})
        self._levels = sorted({device.p for device in alive}, reverse=True)
        self._there = self._count([(one.p, one.node, 1) for one in alive])
        self._replicas = len(problem.base.replicas)
        self._total = problem.current.micro_batches
        self._deepest = max(len(one.stages) for one in problem.base.replicas)
        self._deepest = min(self._deepest, problem.shape.num_layers)
        self._wants = self._all_wants()
        self._visits = 0

    def run(self) -> None:
        """Offers what is found; nothing if there is too much to look at."""
        if self._maps() > MOST:
            return
        lineups = list(self._lineups())
        if not lineups:
            return
        each = -(-self._total // self._replicas)
        limit_s = RAISE * min(one.at_least_s(each) for one in lineups)
        seen: set[tuple[int, ...]] = set()
        while self._visits < VISITS:
            limit_s = min(limit_s, self._best_s())
            new = [one for one in self._sets(lineups, limit_s) if one not in seen]
            seen.update(new)
            sets = [[lineups[index] for index in one] for one in new]
            bounds = [self._shared_s(one) + self._ends_s(one) for one in sets]
            for place in sorted(range(len(sets)), key=lambda place: (bounds[place], place)):
                if bounds[place] >= self._best_s() or self._visits >= VISITS:
                    break
                self._visit(sets[place])
            if limit_s >= self._best_s():
                break
            limit_s *= RAISE

    def _best_s(self) -> float:
        best = self._judge.best()
        return best.effective_s if best else inf

    # What there is to choose from.

    def _maps(self) -> int:
        """At most so many layer maps of single replicas there are."""
        num_layers, wants = self._problem.shape.num_layers, len(self._wants)
        depths = range(1, self._deepest + 1)
        return sum(int(wants**n) * comb(num_layers - 1, n - 1) for n in depths)

    def _all_wants(self) -> list[Want]:
        alive, base = self._problem.cluster.alive, self._problem.base
        widest = max(sum(one.node == node for one in alive) for node in self._nodes)
        largest = max(widest, *(stage.tp for one in base.replicas for stage in one.stages))
        places = {(device.p, device.node) for device in alive}
        if len(self._nodes) > 1:
            places |= {(p, ACROSS) for p in self._levels}
        wants = [
            Want(tp, p, node)
            for tp in self._problem.shape.valid_tps(largest)
            for p, node in sorted(places)
            if tp > 1 or node != ACROSS
        ]
        return [one for one in wants if _fits(self._needs([one]), self._there)]

    def _needs(self, wants: Sequence[Want]) -> tuple[int, ...]:
        return self._count([(one.p, one.node, one.tp) for one in wants])

    def _count(self, items: Sequence[tuple[float, int, int]]) -> tuple[int, ...]:
        return tuple(
            sum(n for p, at, n in items if p >= level and node in (None, at))
            for level in self._levels
            for node in (None, *self._nodes)
        )

    def _lineups(self) -> Iterator[Lineup]:
        """Every replica for which there are devices and memory."""
        limit_s = self._best_s()
        for count in range(1, self._deepest + 1):
            for wants in product(self._wants, repeat=count):
                needs = self._needs(wants)
                if not _fits(needs, self._there):
                    continue
                sites = tuple(Site(one.tp, one.p, one.node == ACROSS) for one in wants)
                maps = self._layouts.maps.of(sites, self._replicas)
                rated = tuple(one for one in maps if one.at_least_s(1) < limit_s)
                if rated:
                    yield Lineup(wants, needs, rated)

    # Sets of replicas.

    def _sets(self, lineups: Sequence[Lineup], limit_s: float) -> list[tuple[int, ...]]:
        """Replicas that may do all micro-batches within the limit."""
        within = [(one.within(limit_s, self._total), index) for index, one in enumerate(lineups)]
        order = sorted((-most, index) for most, index in within if most)
        found: list[tuple[int, ...]] = []
        steps = 0

        def grow(chosen: tuple[int, ...], start: int, done: int, left: tuple[int, ...]) -> None:
            nonlocal steps
            for place in range(start, len(order)):
                more, index = -order[place][0], order[place][1]
                steps += 1
                if done + more * (self._replicas - len(chosen)) < self._total or steps > STEPS:
                    break
                if not _fits(lineups[index].needs, left):
                    continue
                if done + more >= self._total:
                    found.append((*chosen, index))
                if len(chosen) + 1 < self._replicas:
                    rest = tuple(a - b for a, b in zip(left, lineups[index].needs, strict=True))
                    grow((*chosen, index), place, done + more, rest)

        grow((), 0, 0, self._there)
        return [tuple(sorted(chosen)) for chosen in found]

    def _visit(self, chosen: Sequence[Lineup]) -> None:
        self._visits += 1
        groups = allocated(self._problem, self._placed(chosen), self._alive)
        if groups is None:
            return
        self._offer(self._layouts.plan(groups))
        if len(self._nodes) > 1 and len(chosen) > 1:
            # With one layer map for all, owners of a layer may all be on one node.
            ends_s = self._ends_s(chosen)
            for rated in chosen[0].rated:
                if self._layouts.timed_s(groups, rated.depths) + ends_s < self._best_s():
                    self._offer(self._layouts.plan(groups, rated.depths))

    def _offer(self, plan: Plan | None) -> None:
        if plan is not None:
            self._judge.offer("joint", plan)

    def _shared_s(self, chosen: Sequence[Lineup]) -> float:
        """The best split by the bounds."""
        counts = [0] * len(chosen)
        for _ in range(self._total):
            best = min(range(len(chosen)), key=lambda i: (chosen[i].at_least_s(counts[i] + 1), i))
            counts[best] += 1
        return max(one.at_least_s(n) for one, n in zip(chosen, counts, strict=True))

    def _ends_s(self, chosen: Sequence[Lineup]) -> float:
        """At least this long take SYNC and STEP."""
        replicas = len(chosen)
        parameters = max(min(rated.parameters for rated in one.rated) for one in chosen)
        found = self._ends.about_s(parameters, replicas, apart=False)
        # Whatever the layer maps, the first stages share the first layer, the last ones the last.
        for end in (0, -1):
            nodes = {one.wants[end].node for one in chosen}
            if replicas > 1 and (len(nodes) > 1 or ACROSS in nodes):
                parameters = max(self._end_parameters(one, end) for one in chosen)
                found = max(found, self._ends.about_s(parameters, replicas, apart=True))
        return found

    def _end_parameters(self, one: Lineup, end: int) -> int:
        """At least so many elements are on a rank of the first or the last stage."""
        last = len(one.wants) - 1
        return self._problem.shape.rank_parameters(
            depth=min(rated.depths[end] for rated in one.rated),
            tp=one.wants[end].tp,
            first=end == 0 or not last,
            last=end == -1 or not last,
        )

    def _placed(self, chosen: Sequence[Lineup]) -> dict[int, tuple[Choice, ...]]:
        """Puts each replica where most of the devices that it wants are."""
        base, p_of, node_of = self._problem.base, self._problem.p_of, self._problem.cluster.node_of

        def suits(one: Lineup, number: int) -> int:
            pairs = zip(one.wants, base.replicas[number].stages, strict=False)
            return sum(
                min(
                    want.tp,
                    sum(
                        p_of[rank] >= want.p and want.node in (ACROSS, node_of[rank])
                        for rank in stage.ranks
                    ),
                )
                for want, stage in pairs
            )

        numbers = range(self._replicas)
        orders = permutations(numbers, len(chosen)) if len(numbers) < 5 else [tuple(numbers)]
        best = max(orders, key=lambda order: sum(map(suits, chosen, order)))
        pairs = sorted(zip(best, chosen, strict=False), key=lambda pair: pair[0])
        return {number: one.wants for number, one in pairs}


def _fits(needs: Sequence[int], there: Sequence[int]) -> bool:
    return all(need <= have for need, have in zip(needs, there, strict=True))
