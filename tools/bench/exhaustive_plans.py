"""The best step that any plan of a small cluster could have, by branch and bound.

What is searched is said in ``planner_quality.py``. Groups are described, not named: how many
devices, how slow the slowest, on which nodes. Nothing here is shared with the planners' search but
the prices and the clock, which tests compare with the program's dry run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from operator import le

from resihp_ext.plan.action import END
from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Stage
from resihp_ext.scheduler.clock import Hop, Pair, StageTimes, chain_s, web_s
from resihp_ext.scheduler.layers import Depths, compositions, edges
from resihp_ext.scheduler.prices import StageKind
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.routes import dealt


@dataclass(frozen=True, slots=True, order=True)
class Team:
    """Devices of one stage: how many, how slow the slowest, where."""

    tp: int
    p: float
    at: tuple[int, ...]
    """How many are on each node that has live devices."""

    @property
    def across(self) -> bool:
        """Whether it spans nodes."""
        return self.at.count(0) < len(self.at) - 1


@dataclass(frozen=True, eq=False)
class Entry:
    """A replica: groups and layers."""

    number: int
    teams: tuple[Team, ...]
    depths: Depths
    pairs: tuple[Pair, ...]
    work: tuple[float, ...]
    """Seconds of each stage for one micro-batch, both ways."""
    seconds: dict[int, float] = field(default_factory=dict)
    """Pipeline time by micro-batches, where it was asked for."""

    def at_least_s(self, micro_batches: int) -> float:
        """Once through everything; or the way to a stage and back, and all its work."""
        above, found = 0.0, sum(self.work)
        for work in self.work:
            found = max(found, above + micro_batches * work)
            above += work
        return found if micro_batches else 0.0


@dataclass(frozen=True, eq=False)
class Lineup:
    """The groups of a replica, with all layer maps."""

    devices: int
    needs: tuple[int, ...]
    """At each throughput, on each node, how many devices are wanted."""
    entries: tuple[Entry, ...]


class Exhaustive:
    """All plans of a problem that could be faster than one that is known."""

    def __init__(self, problem: Problem, known_s: float) -> None:
        self.best_s = known_s
        self._problem = problem
        self._total = problem.current.micro_batches
        self._alive = problem.cluster.alive
        self._nodes = sorted({device.node for device in self._alive})
        self._levels = sorted({device.p for device in self._alive}, reverse=True)
        self._most = len(problem.current.replicas)
        self._ends: dict[object, float] = {}
        self._least_ends_s = self._least_ends()
        self._there = tuple(
            sum(device.p >= level and device.node == node for device in self._alive)
            for level in self._levels
            for node in self._nodes
        )
        self._lineups = sorted(self._all_lineups(), key=lambda one: one.devices)

    def run(self) -> float:
        """The best time of a step, or the known one."""
        for count in range(1, self._most + 1):
            for split in _splits(self._total, count):
                able = {m: self._able(m, count) for m in set(split)}
                self._grow((), split, [able[m] for m in split], self._there)
        self._cross()
        return self.best_s

    # What there is to choose from.

    def _teams(self) -> list[Team]:
        """Every kind of group for which there are devices; its slowest device is one of its own."""
        largest = max(
            *(stage.tp for one in self._problem.current.replicas for stage in one.stages),
            *(sum(device.node == node for device in self._alive) for node in self._nodes),
        )
        teams = [
            Team(tp, p, at)
            for tp in self._problem.shape.valid_tps(largest)
            for at in _splits(tp, len(self._nodes), ordered=False)
            for p in self._levels
            if any(d.p == p and at[self._nodes.index(d.node)] for d in self._alive)
        ]
        return [team for team in teams if _within(self._needs([team]), self._there)]

    def _needs(self, teams: Sequence[Team]) -> tuple[int, ...]:
        return tuple(
            sum(team.at[place] for team in teams if team.p >= level)
            for level in self._levels
            for place in range(len(self._nodes))
        )

    def _all_lineups(self) -> Iterator[Lineup]:
        num_layers = self._problem.shape.num_layers
        # One more: a damaged stage may become two.
        deepest = 1 + max(len(one.stages) for one in self._problem.current.replicas)
        teams, number = self._teams(), 0
        for count in range(1, min(deepest, num_layers) + 1):
            maps = list(compositions(num_layers, [num_layers] * count))
            for chosen in product(teams, repeat=count):
                needs = self._needs(chosen)
                if not _within(needs, self._there):
                    continue
                entries = [self._entry(number + k, chosen, d) for k, d in enumerate(maps)]
                number += len(entries)
                able = tuple(
                    one
                    for one in entries
                    if one.at_least_s(1) < self._limit_s() and self._fits(one, 1, self._most)
                )
                if able:
                    yield Lineup(sum(team.tp for team in chosen), needs, able)

    def _entry(self, number: int, teams: tuple[Team, ...], depths: Depths) -> Entry:
        last = len(teams) - 1
        pairs = tuple(
            self._problem.prices.pair(
                StageKind(depth, one.tp, one.p, place == 0, place == last, one.across)
            )
            for place, (one, depth) in enumerate(zip(teams, depths, strict=True))
        )
        return Entry(number, teams, depths, pairs, tuple(map(sum, pairs)))

    def _fits(self, entry: Entry, micro_batches: int, shards: int) -> bool:
        """Whether every device has the memory, with as many in flight as 1F1B may have."""
        last = len(entry.teams) - 1
        for place, (one, depth) in enumerate(zip(entry.teams, entry.depths, strict=True)):
            memory = self._problem.memory(depth, one.tp, place == 0, place == last, shards)
            if memory.total(min(micro_batches, last + 1 - place)) > (
                self._problem.cluster.memory_bytes
            ):
                return False
        return True

    # Straight routes.

    def _able(self, micro_batches: int, shards: int) -> list[Lineup]:
        """Replicas that can do so many in less than the best time, with the maps that do."""
        found = []
        for one in self._lineups:
            entries = tuple(
                entry
                for entry in one.entries
                if entry.at_least_s(micro_batches) < self._limit_s()
                and self._fits(entry, micro_batches, shards)
                and self._played_s(entry, micro_batches) < self._limit_s()
            )
            if entries:
                found.append(Lineup(one.devices, one.needs, entries))
        return found

    def _grow(
        self,
        chosen: tuple[int, ...],
        split: Sequence[int],
        able: Sequence[Sequence[Lineup]],
        left: tuple[int, ...],
    ) -> None:
        """Adds one replica after another; of equal shares the order does not matter."""
        place = len(chosen)
        if place == len(split):
            self._judge([able[k][index].entries for k, index in enumerate(chosen)], split)
            return
        twins = place > 0 and split[place - 1] == split[place]
        for index in range(chosen[-1] if twins else 0, len(able[place])):
            one = able[place][index]
            if one.devices > sum(left[-len(self._nodes) :]):
                break
            if _within(one.needs, left):
                rest = tuple(a - b for a, b in zip(left, one.needs, strict=True))
                self._grow((*chosen, index), split, able, rest)

    def _judge(self, options: Sequence[Sequence[Entry]], split: Sequence[int]) -> None:
        """Every combination of layer maps."""
        for chosen in product(*options):
            pipeline_s = max(map(self._played_s, chosen, split))
            if pipeline_s < self._limit_s():
                self.best_s = min(self.best_s, pipeline_s + self._ends_s(chosen))

    def _played_s(self, entry: Entry, micro_batches: int) -> float:
        if not micro_batches:
            return 0.0
        if micro_batches not in entry.seconds:
            hops = [self._hop(a, b) for a, b in zip(entry.teams, entry.teams[1:], strict=False)]
            stages = [StageTimes(pair, pair) for pair in entry.pairs]
            entry.seconds[micro_batches] = chain_s(stages, hops, micro_batches)
        return entry.seconds[micro_batches]

    def _hop(self, a: Team, b: Team) -> Hop:
        """With the devices of a group in the order of their nodes."""
        rank = {device.node: device.rank for device in self._alive}
        ends = [tuple(rank[node] for node in self._places(one)) for one in (a, b)]
        return self._problem.prices.hop(ends[0], ends[1])

    def _places(self, team: Team) -> list[int]:
        """The node of each device."""
        return [node for node, n in zip(self._nodes, team.at, strict=True) for _ in range(n)]

    def _limit_s(self) -> float:
        """A pipeline part that is this long cannot be part of a better step."""
        return self.best_s - self._least_ends_s

    # SYNC and STEP.

    def _least_ends(self) -> float:
        """A STEP over equal parts of the model on all live devices."""
        shape, policy = self._problem.shape, self._problem.policy
        one = Stage(ranks=(0,), layers=(0, shape.num_layers))
        plan = Plan(
            version=0,
            num_layers=shape.num_layers,
            devices=(Device(rank=0, node=0),),
            replicas=(Replica(stages=(one,)),),
            routes=(),
        )
        price = self._problem.cost.cost(plan, shape, policy=replace(policy, sharded=False))
        parts = len(self._alive) * (self._most if policy.sharded else 1)
        return price(Instance(replica=0, stage=0), END[1]) / parts

    def _ends_s(self, chosen: Sequence[Entry]) -> float:
        """Of a plan with these replicas, on devices that are made up for it."""
        key = frozenset((tuple((t.tp, t.at) for t in one.teams), one.depths) for one in chosen)
        if (len(chosen), key) not in self._ends:
            plan = self._made_up(chosen)
            price = self._problem.cost.cost(plan, self._problem.shape, policy=self._problem.policy)
            self._ends[len(chosen), key] = sum(
                max(price(instance, action) for instance in plan.instances) for action in END
            )
        return self._ends[len(chosen), key]

    def _made_up(self, chosen: Sequence[Entry]) -> Plan:
        devices: list[Device] = []
        replicas = []
        for one in chosen:
            stages = []
            for team, layers in zip(one.teams, edges(one.depths), strict=True):
                low = len(devices)
                for node in self._places(team):
                    devices.append(Device(rank=len(devices), node=node, p=team.p))
                stages.append(Stage(ranks=tuple(range(low, len(devices))), layers=layers))
            replicas.append(Replica(stages=tuple(stages)))
        return Plan(
            version=0,
            num_layers=self._problem.shape.num_layers,
            devices=tuple(devices),
            replicas=tuple(replicas),
            routes=(),
        )

    # Crossing routes.

    def _cross(self) -> None:
        """Replicas with one layer map, and every count of micro-batches on every instance."""
        by_map: dict[Depths, list[tuple[Entry, Lineup]]] = {}
        for lineup in self._lineups:
            for entry in lineup.entries:
                if len(entry.depths) > 1 and self._fits(entry, self._total, 1):
                    by_map.setdefault(entry.depths, []).append((entry, lineup))
        for pairs in by_map.values():
            for count in range(2, self._most + 1):
                for chosen in self._together(pairs, count, 0, self._there):
                    self._cross_in(chosen)

    def _together(
        self,
        pairs: Sequence[tuple[Entry, Lineup]],
        count: int,
        start: int,
        left: tuple[int, ...],
    ) -> Iterator[tuple[Entry, ...]]:
        """Sets of replicas for which there are devices."""
        if not count:
            yield ()
            return
        for index in range(start, len(pairs)):
            entry, lineup = pairs[index]
            if _within(lineup.needs, left):
                rest = tuple(a - b for a, b in zip(left, lineup.needs, strict=True))
                for others in self._together(pairs, count - 1, index, rest):
                    yield (entry, *others)

    def _cross_in(self, chosen: Sequence[Entry]) -> None:
        options = [self._counts(chosen, place) for place in range(len(chosen[0].teams))]
        if not all(options):
            return
        ends_s = self._ends_s(chosen)
        options = [[c for s, c in o if s + ends_s < self.best_s] for o in options]
        if not all(options):
            return
        places = range(len(options))
        hops = {
            (len(places) * i + s, len(places) * j + s + 1): self._hop(a.teams[s], b.teams[s + 1])
            for i, a in enumerate(chosen)
            for j, b in enumerate(chosen)
            for s in places[:-1]
        }
        stages = [StageTimes(pair, pair) for one in chosen for pair in one.pairs]
        for counts in product(*options):
            for spread in (False, True):
                ways = dealt(counts, spread=spread)
                routes = [tuple(len(places) * r + s for s, r in enumerate(way)) for way in ways]
                self.best_s = min(self.best_s, web_s(stages, routes, hops) + ends_s)

    def _counts(self, chosen: Sequence[Entry], place: int) -> list[tuple[float, tuple[int, ...]]]:
        """Ways to split the micro-batches at one stage, each with a bound of the step."""
        above = sum(min(one.work[s] for one in chosen) for s in range(place))
        found = []
        for split in _splits(self._total, len(chosen), ordered=False):
            most = max(n * one.work[place] for n, one in zip(split, chosen, strict=True))
            if above + most < self._limit_s():
                found.append((above + most, split))
        return found


def _within(needs: Sequence[int], there: Sequence[int]) -> bool:
    return all(map(le, needs, there))


def _splits(total: int, count: int, *, ordered: bool = True) -> Iterator[tuple[int, ...]]:
    """Ways to split micro-batches over replicas; ordered: the largest share first."""
    if count == 1:
        yield (total,)
        return
    for first in range(total, -1, -1):
        for rest in _splits(total - first, count - 1, ordered=ordered):
            if not ordered or first >= rest[0]:
                yield (first, *rest)
