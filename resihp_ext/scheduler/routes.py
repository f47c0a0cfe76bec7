"""Routes that cross between replicas: each stage's micro-batches shared out on their own.

Where the slow stages of two replicas are not the same ones, whole replicas cannot share the work as
well as their stages can. Only replicas with the same layer map exchange micro-batches.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from resihp_ext.plan.plan import Instance, Plan, Replica, Route
from resihp_ext.scheduler.predict import Predictor
from resihp_ext.scheduler.problem import Problem

LARGE = 1_500
"""Forwards and backwards of a step beyond which crossing routes are not looked for: they help where
few replicas are damaged at different stages, and take the time of the whole step to be judged."""

Counts = tuple[tuple[int, ...], ...]
"""``counts[stage][replica]``: micro-batches that the instance runs."""


def least_s(work: Sequence[float], micro_batches: int) -> tuple[float, tuple[int, ...]]:
    """The best split of micro-batches over instances that take ``work`` seconds for each.

    Returns:
        The time of the slowest, and the split.
    """
    found = [0] * len(work)
    for _ in range(micro_batches):
        best = min(range(len(work)), key=lambda i: ((found[i] + 1) * work[i], i))
        found[best] += 1
    return max(n * each for n, each in zip(found, work, strict=True)), tuple(found)


def dealt(counts: Counts, *, spread: bool) -> list[tuple[int, ...]]:
    """Ways that give each instance its count, with as few changes of replica as that allows.

    Args:
        spread: Whether those that leave a replica are taken from all over its micro-batches, or
            are its last.

    Returns:
        For each micro-batch the replica at each stage.
    """
    ways = [[home] for home in _in_turn(counts[0])]
    for before, after in pairwise(counts):
        room = [max(0, new - old) for old, new in zip(before, after, strict=True)]
        targets = iter(_in_turn(room))
        for replica, (old, new) in enumerate(zip(before, after, strict=True)):
            mine = [number for number, way in enumerate(ways) if way[-1] == replica]
            leaving = max(0, old - new)
            if spread and leaving:
                out = {mine[(2 * k + 1) * old // (2 * leaving)] for k in range(leaving)}
            else:
                out = set(mine[old - leaving :])
            for number in mine:
                # Marked as not placed yet; placed below, in the order of micro-batches.
                ways[number].append(-1 if number in out else replica)
        for way in ways:
            if way[-1] < 0:
                way[-1] = next(targets)
    return [tuple(way) for way in ways]


def _in_turn(counts: Sequence[int]) -> list[int]:
    """Replica numbers as often as counts say, evenly mixed: who is furthest behind comes next."""
    given, order = [0] * len(counts), []
    for _ in range(sum(counts)):
        best = min(
            (i for i in range(len(counts)) if given[i] < counts[i]),
            key=lambda i: ((given[i] + 1) / counts[i], i),
        )
        given[best] += 1
        order.append(best)
    return order


class Crossing:
    """Looks for routes over some replicas with one layer map."""

    def __init__(
        self, problem: Problem, predictor: Predictor, replicas: Sequence[Replica], total: int
    ) -> None:
        self._predictor, self._replicas, self._total = predictor, replicas, total
        times = [[problem.prices.times(s) for s in one.stages] for one in replicas]
        self._work: list[list[float]] = [
            [sum(one.run) for one in place] for place in zip(*times, strict=True)
        ]
        self._seconds: dict[tuple[Counts, bool], float] = {}

    def at_least_s(self) -> float:
        """No routes are faster: a stage's share of the work, the way to it and back."""
        ways = [min(place) for place in self._work]
        above = [sum(ways[:index]) for index in range(len(ways))]
        return max(
            above[index] + least_s(place, self._total)[0] for index, place in enumerate(self._work)
        )

    def best(self, start: Counts | None, budget: int) -> tuple[float, list[tuple[int, ...]]]:
        """Climbs from the best split of each stage, and from another start, if given."""
        starts = [tuple(least_s(place, self._total)[1] for place in self._work)]
        if start is not None:
            starts.append(start)
        found = min(
            (self.seconds(counts, spread), counts, spread)
            for counts in starts
            for spread in (False, True)
        )
        while len(self._seconds) < budget:
            seconds_s, counts, spread = found
            found = min([found, *((self.seconds(c, spread), c, spread) for c in _moves(counts))])
            if found[0] >= seconds_s * (1 - 1e-9):
                break
        return found[0], dealt(found[1], spread=found[2])

    def seconds(self, counts: Counts, spread: bool) -> float:
        """Pipeline time."""
        key = (counts, spread)
        if key not in self._seconds:
            routes = as_routes(dealt(counts, spread=spread))
            self._seconds[key] = self._predictor.pipeline_s(self._replicas, routes)
        return self._seconds[key]


def _moves(counts: Counts) -> Iterator[Counts]:
    """Every way to move one micro-batch at one stage."""
    for index, place in enumerate(counts):
        for source, number in enumerate(place):
            for target in range(len(place)):
                if number and source != target:
                    moved = list(place)
                    moved[source] -= 1
                    moved[target] += 1
                    yield (*counts[:index], tuple(moved), *counts[index + 1 :])


def as_routes(ways: Sequence[tuple[int, ...]]) -> tuple[Route, ...]:
    """Replica numbers as instances; equal ways are one object."""
    known: dict[tuple[int, ...], Route] = {}
    for way in ways:
        if way not in known:
            known[way] = tuple(Instance(replica=r, stage=s) for s, r in enumerate(way))
    return tuple(known[way] for way in ways)


def crossed(problem: Problem, predictor: Predictor, plan: Plan, budget: int) -> Plan | None:
    """A plan like this one with better routes; None if there are none, or not by these means."""
    tasks = 2 * plan.micro_batches * len(plan.replicas[0].stages)
    if len(plan.replicas) < 2 or tasks > LARGE:
        return None
    if len({tuple(stage.layers for stage in one.stages) for one in plan.replicas}) > 1:
        return None
    search = Crossing(problem, predictor, plan.replicas, plan.micro_batches)
    now_s = predictor.pipeline_s(plan.replicas, plan.routes)
    if search.at_least_s() >= now_s * (1 - 1e-9):
        return None
    counts = tuple(
        tuple(
            sum(route[index].replica == number for route in plan.routes)
            for number in range(len(plan.replicas))
        )
        for index in range(len(plan.replicas[0].stages))
    )
    found_s, ways = search.best(counts, budget)
    if found_s >= now_s * (1 - 1e-9):
        return None
    return problem.current.next_version(
        devices=plan.devices, replicas=plan.replicas, routes=as_routes(ways)
    )
