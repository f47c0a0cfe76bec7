"""What the replicas of a small cluster can be, by how their groups look.

A lineup is a number of stages and, for each, a degree, the throughput of its slowest device and a
node; which devices these are follows when a set of lineups is given devices.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import permutations, product
from math import comb

from resihp_ext.scheduler.layouts import Groups
from resihp_ext.scheduler.maps import Maps, Rated, Site
from resihp_ext.scheduler.predict import Ends
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.wants import ACROSS, Choice, Want, allocated

BITS = 8
"""Of each number of devices in a count, the highest of which only says that it is not negative."""


@dataclass(frozen=True, eq=False)
class Lineup:
    """What one replica may be."""

    wants: tuple[Want, ...]
    needs: int
    """Devices that it takes: see :meth:`Lineups.count`."""
    rated: tuple[Rated, ...]
    parameters: int
    """At least so many elements are on the rank that holds most."""
    at_ends: int
    """And on a rank of the first stage, and on one of the last."""
    bounds_s: dict[int, float] = field(default_factory=dict)

    @cached_property
    def size(self) -> int:
        """Devices in all."""
        return sum(want.tp for want in self.wants)

    @property
    def ends(self) -> tuple[int, int]:
        """Nodes of the first and of the last stage."""
        return self.wants[0].node, self.wants[-1].node

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


class Lineups:
    """All lineups of a problem, and what sets of them need."""

    def __init__(self, problem: Problem, maps: Maps) -> None:
        self._problem, self._maps = problem, maps
        self.ends = Ends(problem)
        alive = problem.cluster.alive
        self.nodes = sorted({device.node for device in alive})
        self._levels = sorted({device.p for device in alive}, reverse=True)
        fields = len(self._levels) * (len(self.nodes) + 1)
        self.signs = sum(1 << (BITS * field + BITS - 1) for field in range(fields))
        self.devices = len(alive)
        self.there = self.count([(one.p, one.node, 1) for one in alive]) | self.signs
        self.replicas = len(problem.base.replicas)
        deepest = max(len(one.stages) for one in problem.base.replicas)
        # One more stage than there is: a damaged one may become two.
        self._deepest = min(deepest + 1, problem.shape.num_layers)

    def shallow(self) -> None:
        """From now on replicas get no more stages than the deepest one has."""
        self._deepest = max(1, self._deepest - 1)

    def how_many_maps(self) -> int:
        """At most so many layer maps of single replicas there are."""
        num_layers, wants = self._problem.shape.num_layers, len(self._wants)
        depths = range(1, self._deepest + 1)
        return sum(int(wants**n) * comb(num_layers - 1, n - 1) for n in depths)

    @cached_property
    def _wants(self) -> list[Want]:
        alive, base = self._problem.cluster.alive, self._problem.base
        widest = max(sum(one.node == node for one in alive) for node in self.nodes)
        largest = max(widest, *(stage.tp for one in base.replicas for stage in one.stages))
        places = {(device.p, device.node) for device in alive}
        if len(self.nodes) > 1:
            places |= {(p, ACROSS) for p in self._levels}
        wants = [
            Want(tp, p, node)
            for tp in self._problem.valid_tps(largest)
            for p, node in sorted(places)
            if tp > 1 or node != ACROSS
        ]
        return [one for one in wants if self._is_there(self._needs(one))]

    def _needs(self, want: Want) -> int:
        return self.count([(want.p, want.node, want.tp)])

    def count(self, items: Sequence[tuple[float, int, int]]) -> int:
        """Devices at each throughput, in all and on each node: numbers side by side in one, so that
        all are added, and all are compared, at once."""
        fields = (
            sum(n for p, at, n in items if p >= level and node in (None, at))
            for level in self._levels
            for node in (None, *self.nodes)
        )
        return sum(number << (BITS * field) for field, number in enumerate(fields))

    def _is_there(self, needs: int) -> bool:
        """Where something is lacking, a number has borrowed from its sign."""
        return (self.there - needs) & self.signs == self.signs

    def all(self, limit_s: float) -> Iterator[Lineup]:
        """Every replica for which there are devices and memory, and that may be in time."""
        each = {want: self._needs(want) for want in self._wants}
        for count in range(1, self._deepest + 1):
            for wants in product(self._wants, repeat=count):
                needs = sum(each[want] for want in wants)
                if not self._is_there(needs):
                    continue
                sites = tuple(Site(one.tp, one.p, one.node == ACROSS) for one in wants)
                maps = self._maps.of(sites, self.replicas)
                rated = tuple(one for one in maps if one.at_least_s(1) < limit_s)
                if rated:
                    parameters = min(one.parameters for one in rated)
                    yield Lineup(wants, needs, rated, parameters, self._at_ends(wants, rated))

    def _at_ends(self, wants: Sequence[Want], rated: Sequence[Rated]) -> int:
        last = len(wants) - 1
        return min(
            self._problem.shape.rank_parameters(
                depth=min(one.depths[end] for one in rated),
                tp=wants[end].tp,
                first=end == 0,
                last=end == last,
            )
            for end in {0, last}
        )

    def ends_s(self, chosen: Sequence[Lineup]) -> float:
        """At least this long take SYNC and STEP.

        The first stages share the first layer and the last stages the last one, whatever the layer
        maps: if they are on different nodes, so are the owners of a layer.
        """
        count = len(chosen)
        near_s = self.ends.about_s(max(one.parameters for one in chosen), count, apart=False)
        firsts, lasts = ({one.ends[end] for one in chosen} for end in (0, 1))
        if count == 1 or (len(firsts) == len(lasts) == 1 and ACROSS not in firsts | lasts):
            return near_s
        far_s = self.ends.about_s(max(one.at_ends for one in chosen), count, apart=True)
        return max(near_s, far_s)

    def groups(self, chosen: Sequence[Lineup]) -> Groups | None:
        """Devices for a set of replicas; None if it was too hard to find them."""
        alive = [device.rank for device in self._problem.cluster.alive]
        return allocated(self._problem, self._placed(chosen), alive)

    def _placed(self, chosen: Sequence[Lineup]) -> dict[int, tuple[Choice, ...]]:
        """Puts each replica where most of the devices that it wants are."""
        base, p_of, node_of = self._problem.base, self._problem.p_of, self._problem.cluster.node_of

        def suits(one: Lineup, number: int) -> int:
            found = 0
            for want, stage in zip(one.wants, base.replicas[number].stages, strict=False):
                able = [rank for rank in stage.ranks if p_of[rank] >= want.p]
                near = [rank for rank in able if want.node in (ACROSS, node_of[rank])]
                found += min(want.tp, len(near))
            return found

        numbers = range(self.replicas)
        orders = permutations(numbers, len(chosen)) if len(numbers) < 5 else [tuple(numbers)]
        best = max(orders, key=lambda order: sum(map(suits, chosen, order)))
        pairs = sorted(zip(best, chosen, strict=False), key=lambda pair: pair[0])
        return {number: one.wants for number, one in pairs}


def most_together(
    able: Iterable[tuple[int, int]], replicas: int, devices: int
) -> list[tuple[int, ...]]:
    """For every number of replicas, and every number of devices that they may take together, the
    most micro-batches that they can do; -1 where the devices are too few.

    Args:
        able: Sizes and micro-batches of what a replica can be.
    """
    best: dict[int, int] = {}
    for size, most in able:
        best[size] = max(most, best.get(size, -1))
    found = [(0,) * (devices + 1)]
    for _ in range(replicas):
        fewer = found[-1]
        found.append(
            tuple(
                max(
                    (
                        most + fewer[left - size]
                        for size, most in best.items()
                        if size <= left and fewer[left - size] >= 0
                    ),
                    default=-1,
                )
                for left in range(devices + 1)
            )
        )
    return found
