"""Plans for slow devices, and for devices that are as fast as ever again.

After every step that the detector has judged: speeds that are news are planned for; a plan that is
there is weighed; one that is worth the change is proposed, as newcomers and drained nodes are.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math

from resihp_ext.control import changes
from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, Answer, Prepare, ToRank
from resihp_ext.control.job_state import Job, KnownPlan, Phase, line, ranks_text
from resihp_ext.control.speeds import Better, Speeds
from resihp_ext.control.worth import Case, Verdict, Weighed, weigh
from resihp_ext.detector.suspect import Report

TOLD_STEPS = 50
"""Between two events that say the same: a decision not to act is made after every step."""


def judged(job: Job, report: Report) -> list[Action]:
    """A step was judged."""
    speeds = job.speeds
    speeds.step = max(speeds.step, report.step)
    if math.isfinite(report.observed_s):
        speeds.observed_s = report.observed_s
    if speeds.terms is None:
        return []
    actions: list[Action] = []
    if speeds.found(job.validation.believed(job.slowness.speeds()), _since(report)):
        actions.append(Prepare(job.question("ahead", _usable(job))))
    if not speeds.open or job.phase is not Phase.RUNNING or job.proposal is not None or job.done:
        return actions
    if speeds.better is None or speeds.usable != _usable(job):
        return [*actions, *_ask(job)]
    return [*actions, *_weighed(job, speeds.better)]


def _since(report: Report) -> int:
    """The first step with the speeds that a report has made known."""
    began = [one.since_step for one in report.suspects if one.kind != "link"]
    return min(began, default=report.step)


def _usable(job: Job) -> tuple[int, ...]:
    """Ranks that a plan may use: a drained node only where it cannot be spared."""
    return tuple(rank for rank in job.members if not job.is_drained(rank) or rank in job.kept)


def _ask(job: Job) -> list[Action]:
    speeds, usable = job.speeds, _usable(job)
    if speeds.asked and speeds.usable == usable:
        return []  # the answer is on its way, or was that there is no plan
    speeds.questions += 1
    speeds.asked, speeds.usable, speeds.better = f"speeds {speeds.questions}", usable, None
    return [job.need(speeds.asked, usable, patient=True)]


def planned(job: Job, request: str, answer: Answer) -> list[Action]:
    """The planner's answer; one that is out of date is none."""
    plan = answer.plan
    if plan is not None and request == job.speeds.asked and job.phase is Phase.RUNNING:
        job.speeds.better = Better(
            plan=plan, version=answer.version, now_s=answer.now_s, then_s=answer.then_s
        )
    return []


def _weighed(job: Job, better: Better) -> list[Action]:
    speeds = job.speeds
    assert speeds.terms is not None
    found = weigh(
        Case(
            step=speeds.step,
            since_step=speeds.since_step,
            steady_step=speeds.steady_step,
            changed_step=speeds.changed_step,
            last_step=speeds.last_step,
            observed_s=speeds.observed_s,
            now_s=better.now_s,
            then_s=better.then_s,
            costs_s=tuple(speeds.costs_s),
        ),
        speeds.terms,
    )
    told = _tell(job, found)
    if found.verdict is not Verdict.ACT:
        return told
    reason = line(f"{devices_text(speeds)}: another plan {found.why}")
    return [*told, *_propose(job, better, reason)]


def _tell(job: Job, found: Weighed) -> list[Action]:
    """A decision goes into the job's events, unless it is there already."""
    speeds = job.speeds
    if found.verdict is speeds.said and speeds.step < speeds.said_step + TOLD_STEPS:
        return []
    speeds.said, speeds.said_step = found.verdict, speeds.step
    message = say.Weighed(
        step=speeds.step,
        verdict=found.verdict.value,
        why=line(f"{devices_text(speeds)}: {found.why}"),
        gain=found.gain,
        lost_s=found.lost_s,
        cost_s=found.cost_s,
    )
    return [ToRank(min(job.members), message)]


def _propose(job: Job, better: Better, reason: str) -> list[Action]:
    drained = set(job.members) - set(_usable(job))
    changes.begin(job, members=job.members, drained=drained, reason=reason)
    job.speeds.said = None  # if it is taken back, that it is made again is news
    return changes.planned(job, KnownPlan.of(better.plan, better.version), "")


def devices_text(speeds: Speeds) -> str:
    """Whose speed is another one than the plan takes it for."""
    other: dict[float, list[int]] = {}
    for rank in sorted({*speeds.p, *speeds.planned}):
        p = speeds.p.get(rank, 1.0)
        if p != speeds.planned.get(rank, 1.0):
            other.setdefault(p, []).append(rank)
    parts = [
        f"{ranks_text(ranks)} at {p:.2f} of full speed"
        if p < 1
        else f"{ranks_text(ranks)} at full speed again"
        for p, ranks in sorted(other.items())
    ]
    return ", ".join(parts)
