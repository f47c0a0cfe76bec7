"""Crossing routes in a small cluster: sets of replicas with one layer map whose stages share the
micro-batches each on their own.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from resihp_ext.scheduler.decision import Judge
from resihp_ext.scheduler.layers import Depths
from resihp_ext.scheduler.layouts import Layouts
from resihp_ext.scheduler.lineups import Lineup, Lineups, most_together
from resihp_ext.scheduler.maps import Rated
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.routes import crossed, least_s
from resihp_ext.scheduler.wants import ACROSS

VISITS = 30
"""Most layouts for which routes are looked for."""
STEPS = 100_000
"""Most sets of replicas that are looked at."""
PLAYS = 80
"""Most routes that are played out for one layout."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A replica with a layer map."""

    lineup: Lineup
    work: tuple[float, ...]
    """Seconds of each stage for a micro-batch."""
    within: tuple[int, ...]
    """Micro-batches that each stage may do in time."""


class CrossSearch:
    """Search of sets of replicas for which a bound promises a faster step."""

    def __init__(self, problem: Problem, judge: Judge, layouts: Layouts, lineups: Lineups) -> None:
        self._problem, self._judge, self._layouts, self._lineups = problem, judge, layouts, lineups
        self._total = problem.current.micro_batches
        self._steps = 0

    def run(self, lineups: Sequence[Lineup]) -> None:
        """Offers what is found."""
        by_map: dict[Depths, list[tuple[Lineup, Rated]]] = {}
        for one in lineups:
            for rated in one.rated:
                if len(one.wants) > 1:
                    by_map.setdefault(rated.depths, []).append((one, rated))
        found: list[tuple[float, int, Depths, tuple[_Member, ...]]] = []
        for depths, pairs in by_map.items():
            for count in range(2, self._lineups.replicas + 1):
                for chosen in self._sets(pairs, count):
                    bound_s = self._at_least_s(chosen)
                    if bound_s < self._judge.limit_s():
                        found.append((bound_s, len(found), depths, chosen))
        for bound_s, _, depths, chosen in sorted(found, key=lambda one: one[:2])[:VISITS]:
            if bound_s >= self._judge.limit_s():
                break
            self._visit(depths, chosen)

    def _sets(
        self, pairs: Sequence[tuple[Lineup, Rated]], count: int
    ) -> Iterator[tuple[_Member, ...]]:
        """Sets of so many replicas; those whose ends share nodes, and then any."""
        about_s, best_s = self._lineups.ends.about_s, self._judge.limit_s()
        by_nodes: dict[tuple[int, int], list[_Member]] = {}
        anywhere = []
        columns = zip(*([sum(b.pair) for b in rated.bounds] for _, rated in pairs), strict=True)
        above = list(accumulate(map(min, columns), initial=0.0))[:-1]
        for one, rated in pairs:
            near_s = about_s(rated.parameters, count, apart=False)
            member = _member(one, rated, above, best_s - near_s, self._total)
            by_nodes.setdefault(one.ends, []).append(member)
            far_s = max(near_s, about_s(one.at_ends, count, apart=True))
            anywhere.append(_member(one, rated, above, best_s - far_s, self._total))
        for nodes, members in by_nodes.items():
            if ACROSS not in nodes:
                yield from self._grown(members, count)
        if len(by_nodes) > 1:
            for chosen in self._grown(anywhere, count):
                if len({one.lineup.ends for one in chosen}) > 1 or ACROSS in chosen[0].lineup.ends:
                    yield chosen

    def _grown(self, members: Sequence[_Member], count: int) -> Iterator[tuple[_Member, ...]]:
        """Sets of which each stage may do all micro-batches in time."""
        able = [one for one in members if any(one.within)]
        if not able:
            return
        signs, devices = self._lineups.signs, self._lineups.devices
        together = [
            most_together([(one.lineup.size, one.within[stage]) for one in able], count, devices)
            for stage in range(len(able[0].within))
        ]

        def grow(
            chosen: tuple[_Member, ...], start: int, lacking: tuple[int, ...], left: int, free: int
        ) -> Iterator[tuple[_Member, ...]]:
            missing = count - len(chosen)
            if not missing:
                yield chosen
                return
            for place in range(start, len(able)):
                self._steps += 1
                if self._steps > STEPS:
                    return
                one = able[place]
                rest, kept = left - one.lineup.needs, free - one.lineup.size
                if rest & signs != signs:
                    continue
                after = tuple(a - b for a, b in zip(lacking, one.within, strict=True))
                if all(
                    max(0, lack) <= most[missing - 1][kept]
                    for lack, most in zip(after, together, strict=True)
                ):
                    yield from grow((*chosen, one), place, after, rest, kept)

        yield from grow((), 0, (self._total,) * len(together), self._lineups.there, devices)

    def _at_least_s(self, chosen: Sequence[_Member]) -> float:
        """The way to a stage and back, its part of the work, SYNC and STEP."""
        above = pipeline_s = 0.0
        for work in zip(*(one.work for one in chosen), strict=True):
            pipeline_s = max(pipeline_s, above + least_s(work, self._total)[0])
            above += min(work)
        return pipeline_s + self._lineups.ends_s([one.lineup for one in chosen])

    def _visit(self, depths: Depths, chosen: Sequence[_Member]) -> None:
        groups = self._lineups.groups([one.lineup for one in chosen])
        if groups is None:
            return
        plan = self._layouts.plan(groups, dict.fromkeys(groups, depths))
        if plan is None:
            return
        found = crossed(self._problem, self._judge.predictor, plan, PLAYS)
        if found is not None:
            self._judge.offer("joint", found)


def _member(
    lineup: Lineup, rated: Rated, above: Sequence[float], limit_s: float, total: int
) -> _Member:
    """The way to each stage may lead over faster replicas."""
    work = tuple(sum(bound.pair) for bound in rated.bounds)
    within = [max(0.0, (limit_s - a) / w) for a, w in zip(above, work, strict=True)]
    return _Member(lineup, work, tuple(int(min(most, total)) for most in within))
