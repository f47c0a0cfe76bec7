"""Watches the times that ranks tell, says who is slow, and knows how slow; changes nothing.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from resihp_ext.plan.plan import Plan

if TYPE_CHECKING:
    from resihp_ext.detector.detector import Detector
    from resihp_ext.detector.suspect import Report
    from resihp_ext.detector.timed import RankStep

logger = logging.getLogger(__name__)

Nodes = Callable[[], Mapping[int, str]]
SLOW = 0.9
"""A device with less than this part of its throughput is a slow one."""
_STEPS_KEPT = 4
"""Of which not all ranks have told: news may get lost."""


class Slowness:
    """The detector of one job, fed by single messages; the same messages give the same lines."""

    def __init__(self) -> None:
        self._text = ""
        self._plan: Plan | None = None
        self._detector: Detector | None = None
        self._ranks: frozenset[int] = frozenset()
        """Of the plan."""
        self._told: dict[int, dict[int, RankStep]] = {}
        """By step and rank."""
        self._aside: dict[int, float] = {}
        """Throughput of slow devices that hold no stage of the plan, by rank."""
        self._failed = False
        self.report: Report | None = None
        """Of the latest step that was judged."""
        self.suspected: Counter[str] = Counter()
        """Reports so far, by kind of suspect."""

    @property
    def plan(self) -> Plan | None:
        """The last one that anybody has told times of."""
        return self._plan

    def heard(self, times: RankStep, plan_text: str, nodes: Nodes) -> list[str]:
        """A rank has told of a step.

        Args:
            plan_text: JSON of the plan that runs.
            nodes: Gives the names of the ranks' nodes, when there is something to say.

        Returns:
            Lines for people.
        """
        if self._failed:
            return []
        try:
            return self._heard(times, plan_text, nodes)
        except Exception as error:
            # Training must not end because somebody who only looks on has failed.
            self._failed = True
            logger.exception("the detector failed")
            return [f"resihp: slow devices are not looked for any more: {error!r}"[:400]]

    def speeds(self) -> dict[int, float]:
        """Throughput of all devices that are known to be slow, in hundredths, by rank."""
        found = {} if self._detector is None else self._detector.speeds()
        return {
            rank: max(0.01, round(p, 2)) for rank, p in sorted({**self._aside, **found}.items())
        }

    def confirmed(
        self, p: Mapping[int, float], links: Mapping[tuple[int, int], float] | None = None
    ) -> None:
        """Takes what a validation has found: throughputs by rank, also of devices on standby, and
        by pair of ranks."""
        if self._detector is not None and not self._failed:
            self._detector.confirm(p, links)
        for rank in p.keys() - self._ranks:
            self._aside.pop(rank, None)
            if p[rank] < SLOW:
                self._aside[rank] = p[rank]

    def cleared(self, ranks: Iterable[int], links: Iterable[tuple[int, int]] = ()) -> None:
        """What was slow before was measured as healthy."""
        ranks = tuple(ranks)
        if self._detector is not None and not self._failed:
            self._detector.clear(ranks, links)
        for rank in ranks:
            self._aside.pop(rank, None)

    def forget(self, ranks: Iterable[int]) -> None:
        """Other devices take the places of some ranks."""
        self.confirmed(dict.fromkeys(ranks, 1.0))

    def _heard(self, times: RankStep, plan_text: str, nodes: Nodes) -> list[str]:
        plan = self._known(plan_text)
        if times.version != plan.version:
            return []
        told = self._told.setdefault(times.step, {})
        told[times.rank] = times
        if not self._ranks <= told.keys():
            while len(self._told) > _STEPS_KEPT:
                del self._told[min(self._told)]
            return []
        for step in [one for one in self._told if one <= times.step]:
            del self._told[step]
        return self._judge(times.step, told, nodes)

    def _judge(self, step: int, told: Mapping[int, RankStep], nodes: Nodes) -> list[str]:
        from resihp_ext.detector.say import report_lines

        assert self._detector is not None
        self.report = self._detector.observe(step, told)
        for suspect in self.report.suspects:
            self.suspected[suspect.kind] += 1
        return report_lines(self.report, nodes(), plan=self._plan)

    def _known(self, text: str) -> Plan:
        """The plan that runs, which the detector is told of when it is another one."""
        # Imported late: numpy is not needed where nobody looks for slowness.
        from resihp_ext.detector.detector import Detector

        if self._plan is None or text != self._text:
            self._text, self._plan = text, Plan.from_json(text)
            self._ranks = frozenset(rank for one in self._plan.replicas for rank in one.ranks)
            self._told.clear()
            if self._detector is None:
                self._detector = Detector(self._plan)
            else:
                self._adopt(self._detector, self._plan)
        return self._plan

    def _adopt(self, detector: Detector, plan: Plan) -> None:
        """Goes on with another plan: nothing is learned anew, and nobody is forgotten."""
        known = {**self._aside, **detector.speeds()}
        detector.adopt(plan)
        back = {rank: p for rank, p in self._aside.items() if rank in self._ranks}
        detector.confirm(back)
        self._aside = {rank: p for rank, p in known.items() if rank not in self._ranks}
