"""Has suspects measured before anybody believes that they are slow, and slow ones measured again.

One probe at a time, at a boundary between steps that members agree on. What comes of it goes to the
detector, to people, and to ``events.jsonl``. Clocks play no part: a probe of which nothing is heard
for some steps is asked for once more, and then given up.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, Record, Say, ToRank
from resihp_ext.control.slowness import Slowness
from resihp_ext.detector.probe import Task
from resihp_ext.detector.suspect import Report, Suspect, SuspectKind, Verdict
from resihp_ext.events import Event

if TYPE_CHECKING:
    from resihp_ext.detector.validate import Finding

logger = logging.getLogger(__name__)

Nodes = Callable[[], Mapping[int, str]]
Key = tuple[SuspectKind, tuple[int, ...]]
"""Kind of a suspect, and its ranks."""

ANSWER_STEPS = 8
"""From asking to the step by which all have answered: they agree in one step, measure before the
next, and news of steps may come late."""
TRIES = 3
"""Of a suspect, until it is given up for now."""
NEWS_RATIO = 1.1
"""A known slow device is news again when its speed has changed by this factor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Crew:
    """Who can be asked."""

    epoch: int
    members: tuple[int, ...]
    free: bool
    """Whether no change of the layout is under way."""


@dataclass(slots=True)
class _Case:
    """A suspect that is to be measured."""

    suspect: Suspect
    again: bool
    """Whether it was measured as slow, or could not be measured, before."""
    tries: int = 0

    @property
    def key(self) -> Key:
        return self.suspect.kind, self.suspect.ranks


@dataclass(slots=True)
class _Asked:
    """The probe that is under way."""

    case: _Case
    number: int
    epoch: int
    tasks: tuple[Task, ...]
    due_step: int
    answers: dict[int, say.Probed] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return {rank for task in self.tasks for rank in task.ranks} <= self.answers.keys()


class Validation:
    """Suspects of one job, from suspicion to verdict; the same news give the same actions."""

    def __init__(self) -> None:
        self.recheck_steps = 0
        """Steps between two measurements of what was found slow, or could not be measured; 0:
        none."""
        self._waiting: deque[_Case] = deque()
        self._asked: _Asked | None = None
        self._number = 0
        self._judged_step = 0
        self._known: dict[Key, float] = {}
        """Found slow, with the lowest throughput that was measured."""
        self._speeds: dict[int, float] = {}
        self._doubtful: dict[Key, Suspect] = {}
        """Could not be measured."""
        self._checked: dict[Key, int] = {}
        """Step of the last measurement."""
        self._failed = False
        self.decided: tuple[Suspect, ...] = ()
        """What the latest measurement was about."""

    def believed(self, speeds: Mapping[int, float]) -> dict[int, float]:
        """What plans are made for: as long as a device is being measured, what was measured before.

        Args:
            speeds: Throughput of all devices that seem to be slow, by rank.
        """
        found = dict(speeds)
        running = [] if self._asked is None else [self._asked.case]
        for case in (*self._waiting, *running):
            for rank in case.suspect.ranks if case.suspect.kind != "link" else ():
                found.pop(rank, None)
                if rank in self._speeds:
                    found[rank] = max(0.01, round(self._speeds[rank], 2))
        return dict(sorted(found.items()))

    def watch(self, slowness: Slowness, crew: Crew, nodes: Nodes) -> list[Action]:
        """Looks at the latest report of the detector; asks for what is to be measured."""
        report = slowness.report
        if self._failed or report is None or report.step <= self._judged_step:
            return []
        try:
            self._judged_step = report.step
            self._take(report)
            return [*self._overdue(report.step, crew, nodes), *self._ask(slowness, crew, nodes)]
        except Exception as error:
            logger.exception("validation failed")
            return self._gives_up(error)

    def probed(self, message: say.Probed, slowness: Slowness, nodes: Nodes) -> list[Action]:
        """A rank has measured its part."""
        asked = self._asked
        if self._failed or asked is None or message.number != asked.number:
            return []
        asked.answers[message.rank] = message
        if not asked.complete:
            return []
        try:
            self._asked, self.decided = None, (asked.case.suspect,)
            return self._judge(asked, slowness, nodes)
        except Exception as error:
            logger.exception("validation failed")
            return self._gives_up(error)

    def _gives_up(self, error: Exception) -> list[Action]:
        # Training must not end because somebody who only looks on has failed.
        self._failed, self._asked = True, None
        return [Say(f"resihp: slow devices are not measured any more: {error!r}"[:400])]

    # Who is to be measured

    def _take(self, report: Report) -> None:
        for suspect in report.suspects:
            self._line_up(suspect, again=(suspect.kind, suspect.ranks) in self._known)
        back = set(report.recovered)
        for key, p in list(self._known.items()):
            checked = self._checked.get(key, report.step)
            due = self.recheck_steps > 0 and report.step - checked >= self.recheck_steps
            # The detector's word alone does not clear what was measured.
            if due or (back & set(key[1]) and checked < report.step):
                self._line_up(_known(key, p, report.step), again=True)
        for key, suspect in list(self._doubtful.items()):
            due = report.step - self._checked.get(key, report.step) >= self.recheck_steps
            if self.recheck_steps and due:
                self._line_up(suspect, again=True)

    def _line_up(self, suspect: Suspect, *, again: bool) -> None:
        case = _Case(suspect, again)
        running = [] if self._asked is None else [self._asked.case]
        if all(one.key != case.key for one in (*self._waiting, *running)):
            self._waiting.append(case)

    def _ask(self, slowness: Slowness, crew: Crew, nodes: Nodes) -> list[Action]:
        # Imported late, as the detector is: not needed where nobody looks for slowness.
        from resihp_ext.detector.references import tasks_for

        plan, actions = slowness.plan, []
        while self._waiting and self._asked is None and crew.free and plan is not None:
            case = self._waiting.popleft()
            if not set(case.suspect.ranks) <= set(crew.members):
                self._forget(case.key)
                continue
            tasks = tasks_for(case.suspect, plan, set(crew.members) - self._doubted(case))
            if not tasks:
                actions += self._unknown(case, "nobody to compare with", nodes)
                continue
            case.tries += 1
            self._number += 1
            due_step = self._judged_step + ANSWER_STEPS
            self._asked = _Asked(case, self._number, crew.epoch, tasks, due_step)
            message = say.Probe(number=self._number, epoch=crew.epoch, tasks=tasks)
            actions += [ToRank(rank, message) for rank in crew.members]
        return actions

    def _doubted(self, case: _Case) -> set[int]:
        """Who cannot stand for a healthy one."""
        suspects = [one.suspect for one in (case, *self._waiting)]
        keys = [*self._known, *self._doubtful]
        return {rank for one in suspects for rank in one.ranks} | {
            rank for _, ranks in keys for rank in ranks
        }

    def _overdue(self, step: int, crew: Crew, nodes: Nodes) -> list[Action]:
        asked = self._asked
        if asked is None or (asked.epoch == crew.epoch and step < asked.due_step):
            return []
        # Somebody was lost or came meanwhile, or it came to no agreement.
        self._asked = None
        if asked.case.tries < TRIES:
            self._waiting.append(asked.case)
            return []
        return self._unknown(asked.case, "no answer", nodes)

    # What came of it

    def _judge(self, asked: _Asked, slowness: Slowness, nodes: Nodes) -> list[Action]:
        from resihp_ext.detector.validate import judge

        suspect = asked.case.suspect
        seconds = {
            (one.task, rank): one.seconds
            for rank, answer in asked.answers.items()
            for one in answer.measured
        }
        found = judge(suspect, asked.tasks, seconds)
        took_s = max(answer.took_s for answer in asked.answers.values())
        before = self._known.get(asked.case.key)
        if found.verdict is Verdict.HEALTHY and before is not None:
            slowness.cleared(found.p, found.links)
        elif found.verdict is not Verdict.SLOW or _differ(before, found.least_p):
            slowness.confirmed(found.p, found.links)
        line = self._settle(asked.case, found, nodes)
        return [*([Say(line)] if line else []), self._record(asked.case, found, took_s)]

    def _settle(self, case: _Case, found: Finding, nodes: Nodes) -> str:
        """Remembers a verdict; returns what people are to know of it."""
        from resihp_ext.detector.say import remeasured_line, verdict_line

        key, p, before = case.key, found.least_p, self._known.get(case.key)
        self._checked[key] = self._judged_step
        for rank, value in found.p.items():
            if rank not in found.slow:
                self._speeds.pop(rank, None)
            elif _differ(self._speeds.get(rank), value):
                self._speeds[rank] = value
        match found.verdict:
            case Verdict.SLOW:
                assert p is not None
                self._doubtful.pop(key, None)
                if not _differ(before, p):
                    return ""
                self._known[key] = p
            case Verdict.HEALTHY:
                self._forget(key)
                if before is not None and p is not None:
                    link = case.suspect.kind == "link"
                    return remeasured_line(case.suspect.ranks, nodes(), p, link=link)
            case Verdict.UNKNOWN:
                known = key in self._known or key in self._doubtful
                if key not in self._known:
                    self._doubtful[key] = case.suspect
                if known:
                    return ""
        return verdict_line(case.suspect, nodes(), found.verdict, p)

    def _forget(self, key: Key) -> None:
        self._known.pop(key, None)
        self._doubtful.pop(key, None)
        for rank in key[1] if key[0] != "link" else ():
            self._speeds.pop(rank, None)

    def _unknown(self, case: _Case, why: str, nodes: Nodes) -> list[Action]:
        from resihp_ext.detector.validate import Finding

        found = Finding(verdict=Verdict.UNKNOWN, evidence=why)
        line = self._settle(case, found, nodes)
        return [*([Say(line)] if line else []), self._record(case, found, 0.0)]

    def _record(self, case: _Case, found: Finding, took_s: float) -> Record:
        suspect = case.suspect
        fields = {
            "kind": suspect.kind,
            "ranks": list(suspect.ranks),
            "verdict": found.verdict.value,
            "p": {str(rank): value for rank, value in sorted(found.p.items())},
            "links": [[*pair, value] for pair, value in sorted(found.links.items())],
            "estimated_p": suspect.p,
            "again": case.again,
            "evidence": found.evidence,
            "took_s": took_s,
        }
        return Record(Event.VALIDATION, self._judged_step, fields)


def _known(key: Key, p: float, step: int) -> Suspect:
    """What was found slow before, to be measured again."""
    kind, ranks = key
    return Suspect(kind=kind, ranks=ranks, p=p, since_step=step, evidence="was measured as slow")


def _differ(before: float | None, p: float | None) -> bool:
    """Whether a throughput is news; small differences are those between two measurements."""
    return before is None or p is None or max(p / before, before / p) >= NEWS_RATIO
