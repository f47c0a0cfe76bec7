"""The coordinator's rules for slow devices: real detector, real planner, messages by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from coordinated import Driver
from measured_steps import measured
from problems import depths_of, shares_of

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, Answer, NeedPlan, Prepare, Say, ToRank
from resihp_ext.control.membership import Phase
from resihp_ext.control.planner import PlannerProcess
from resihp_ext.control.planning import Brief, plan_for
from resihp_ext.control.slowness import Slowness
from resihp_ext.control.worth import Terms
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.detector.probe import Measured
from resihp_ext.plan.plan import Plan, uniform_plan

pytestmark = pytest.mark.unit

LAYERS, STEPS = 8, 1000
PLAN = uniform_plan(num_layers=LAYERS, tp=1, pp=2, dp=2, micro_batches=8)
TERMS = Terms(after_steps=2, transition_s=0.1, cool_down_steps=5, at_once_ratio=0.0)
SLOW = {2: 0.5}


class Adapted(Driver):
    """Members that tell of every step, agree to what is proposed, and run it two steps later."""

    def __init__(
        self,
        act: Terms | None = TERMS,
        last_step: int = STEPS,
        *,
        recheck_steps: int = 0,
        phantoms: bool = False,
        measures: bool = True,
    ) -> None:
        super().__init__(nodes=2, each=2)
        self.phantoms, self.measures = phantoms, measures
        brief = Brief(
            shape=replace(MODELS["llama2-7b"], num_layers=LAYERS),
            policy=MemoryPolicy(),
            memory_bytes=10**12,
            nominal=PLAN,
            hardware="a100",
            act=act,
            last_step=last_step,
        )
        self.step, self.agrees, self.answers = 0, True, True
        self.proposed: list[say.Propose] = []
        self.hear(
            say.Described(
                rank=0, problem=brief.to_json(), plan=PLAN.to_json(), recheck_steps=recheck_steps
            )
        )
        for rank in range(4):
            self.hear(say.Armed(rank=rank))

    @property
    def plan_now(self) -> Plan:
        assert self.rules.job.plan is not None
        return Plan.from_json(self.rules.job.plan.text)

    def train(self, steps: int, p: Mapping[int, float] | None = None) -> Adapted:
        """So many steps, with devices of these speeds."""
        for _ in range(steps):
            self.step += 1
            plan = self.plan_now
            for rank in sorted(one for each in plan.replicas for one in each.ranks):
                times = measured(plan, rank, self.step, 1 / (p or {}).get(rank, 1.0))
                self._react(self.hear(say.Timed(rank=rank, times=times)))
            if self.measures:
                self._measure({} if self.phantoms else p or {})
        return self

    def _measure(self, p: Mapping[int, float]) -> None:
        """What was asked for is measured before the next step."""
        probes = self.said(say.Probe)
        for probe in set(probes.values()):
            for rank in sorted({rank for task in probe.tasks for rank in task.ranks}):
                seconds = (0.004 / p.get(rank, 1.0),) * 4
                answer = say.Probed(
                    rank=rank,
                    number=probe.number,
                    step=self.step + 1,
                    took_s=0.02,
                    measured=tuple(
                        Measured(at, seconds)
                        for at, task in enumerate(probe.tasks)
                        if rank in task.ranks
                    ),
                )
                self._react(self.hear(answer))

    def _react(self, actions: list[Action]) -> None:
        for need in [one for one in actions if isinstance(one, NeedPlan)]:
            if self.answers:
                self._react(self.take(self.rules.planned(need.request, plan_for(need).answer())))
        proposals = self.said(say.Propose)
        if proposals and self.agrees:
            (proposal,) = set(proposals.values())
            self.proposed.append(proposal)
            self.agree(proposal.number, self.step + 2)
            for rank in proposal.members:
                self.hear(say.Adopted(rank=rank, epoch=proposal.epoch, version=1, took_s=0.25))
            assert self.phase is Phase.RUNNING

    def weighed(self) -> list[say.Weighed]:
        found = [one.message for one in self.log if isinstance(one, ToRank)]
        return [one for one in found if isinstance(one, say.Weighed)]

    def asked(self) -> list[NeedPlan]:
        return [one for one in self.log if isinstance(one, NeedPlan)]

    def lines(self) -> list[str]:
        return [one.line for one in self.log if isinstance(one, Say)]


def speeds_of(plan: Plan) -> dict[int, float]:
    return {one.rank: one.p for one in plan.devices}


def test_a_slow_device_changes_the_plan_and_nobody_is_blamed_afterwards() -> None:
    job = Adapted().train(20).train(30, SLOW)
    (proposal,) = job.proposed
    assert proposal.members == (0, 1, 2, 3)
    assert proposal.reason.startswith("rank 2 at 0.50 of full speed: another plan saves ")
    assert "were lost since step 21" in proposal.reason
    assert speeds_of(job.plan_now) == {0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0}
    assert job.plan_now.replicas != PLAN.replicas or job.plan_now.routes != PLAN.routes
    assert [one.verdict for one in job.weighed()] == ["wait", "act"]
    assert len(job.asked()) == 1
    assert [line.split("; ")[-1].split(": ")[-1] for line in job.lines()] == [
        "measuring it",
        "measured at 0.50 of full speed, slow indeed",
    ]
    assert job.rules.job.slowness.speeds() == SLOW


def test_a_device_that_recovers_changes_it_back() -> None:
    job = Adapted().train(20).train(20, SLOW).train(30)
    assert len(job.proposed) == 2
    assert job.proposed[1].reason.startswith("rank 2 at full speed again: another plan saves ")
    assert shares_of(job.plan_now) == [4, 4]
    assert depths_of(job.plan_now)[0] == depths_of(job.plan_now)[1]
    assert set(speeds_of(job.plan_now).values()) == {1.0}
    assert [line.split(" (node")[0] for line in job.lines()] == ["resihp: rank 2"] * 4
    assert job.lines()[-1].endswith("measured at 1.00 of full speed, slow no more")
    # What the first change has taken counts for the second one.
    assert job.weighed()[-1].cost_s == 0.25
    assert len(job.asked()) == 2


def test_whoever_only_observes_changes_nothing() -> None:
    job = Adapted(act=None).train(20).train(30, SLOW)
    assert len(job.lines()) == 2
    assert not job.asked()
    assert not job.weighed()
    job.die(3)
    assert job.need().devices == ((0, 0, 1), (1, 0, 1), (2, 1, 1), (3, 1, 0))


def test_a_phantom_changes_nothing() -> None:
    """Timers say that it is slow, and products of matrices that it is not."""
    job = Adapted(phantoms=True).train(20).train(60, SLOW)
    assert [line.split(": ")[-1] for line in job.lines()][1:] == [
        "measured at 1.00 of full speed, healthy after all; nothing changes"
    ]
    assert not job.proposed
    assert not job.asked()


def test_who_is_on_standby_is_measured_again_and_comes_back() -> None:
    job = Adapted(recheck_steps=20).train(20).train(30, {2: 0.03})
    assert job.plan_now.standby == (2,)
    job.train(60, {2: 0.03})
    assert job.plan_now.standby == (2,)
    assert len(job.lines()) == 2, "the same again is no news"
    job.train(30)
    assert job.lines()[-1].endswith("measured at 1.00 of full speed, slow no more")
    assert job.plan_now.standby == ()
    assert speeds_of(job.plan_now) == dict.fromkeys(range(4), 1.0)


def test_a_suspect_that_nobody_measures_is_believed_to_be_slow() -> None:
    job = Adapted(measures=False).train(20).train(60, SLOW)
    assert [line.split(": ")[-1] for line in job.lines()][1:] == [
        "could not be measured; taken for slow, as its times say"
    ]
    assert len(job.proposed) == 1


def test_plans_after_a_death_know_who_is_slow() -> None:
    job = Adapted(replace(TERMS, least_speedup_ratio=5.0)).train(20).train(6, SLOW)
    ahead = [one.need for one in job.log if isinstance(one, Prepare)]
    assert ahead[-1].devices[2] == (2, 1, 0.5)
    job.die(3)
    assert job.need().devices == ((0, 0, 1), (1, 0, 1), (2, 1, 0.5), (3, 1, 0))
    assert not job.need().patient
    found = Plan.from_json(plan_for(job.need()).plan or "")
    assert speeds_of(found) == {0: 1.0, 1: 1.0, 2: 0.5, 3: 0.0}


def test_what_is_not_worth_it_is_said_now_and_then() -> None:
    job = Adapted(replace(TERMS, least_speedup_ratio=5.0)).train(20).train(70, SLOW)
    assert not job.proposed
    assert [one.verdict for one in job.weighed()] == ["no", "no"]
    assert job.weighed()[0].why.startswith("rank 2 at 0.50 of full speed: another plan saves")
    assert len(job.asked()) == 1


def test_nothing_is_changed_shortly_before_the_end() -> None:
    job = Adapted(replace(TERMS, transition_s=1.0), last_step=27).train(20).train(5, SLOW)
    assert not job.proposed
    assert job.weighed()[-1].verdict == "no"
    assert "steps are left" in job.weighed()[-1].why


def test_an_operator_comes_first() -> None:
    job = Adapted()
    job.agrees = False
    job.train(20).train(10, SLOW)
    before = job.rules.job.proposal
    assert before is not None
    assert before.plan is not None
    job.take(job.rules.drain("n0"))
    assert {one.number for one in job.said(say.Withdraw).values()} == {before.number}
    assert job.need().devices == ((0, 0, 0), (1, 0, 0), (2, 1, 0.5), (3, 1, 1))


def test_a_proposal_that_was_taken_back_is_made_again() -> None:
    job = Adapted()
    job.agrees = False
    job.train(20).train(10, SLOW)
    job.take(job.rules.readmit("n0"))
    before = job.rules.job.proposal
    assert before is not None
    job.rules.job.slots.nodes["n0"].drained = True
    job.take(job.rules.readmit("n0"))
    assert job.rules.job.proposal is None
    job.agrees = True
    job.train(3, SLOW)
    assert [one.number for one in job.proposed] == [before.number + 1]


def test_an_answer_that_is_out_of_date_is_none() -> None:
    job = Adapted()
    job.answers = False
    job.train(20).train(4, SLOW)
    old = job.need()
    assert old.patient
    job.die(3)
    assert job.take(job.rules.planned(old.request, plan_for(old).answer())) == []
    assert job.rules.job.speeds.better is None


def test_no_plan_is_an_answer() -> None:
    job = Adapted()
    job.answers = False
    job.train(20).train(4, SLOW)
    job.take(job.rules.planned(job.need().request, Answer(None, "nothing fits")))
    job.train(20, SLOW)
    assert len(job.asked()) == 1
    assert job.phase is Phase.RUNNING


def test_who_holds_no_stage_is_not_forgotten() -> None:
    slowness = Slowness()
    for step in range(1, 20):
        for rank in range(4):
            slowness.heard(measured(PLAN, rank, step), PLAN.to_json(), dict)
    slowness.confirmed({1: 0.254, 2: 0.5})
    assert slowness.speeds() == {1: 0.25, 2: 0.5}
    without = uniform_plan(num_layers=LAYERS, tp=1, pp=2, dp=1, micro_batches=8)
    without = replace(without, version=1, devices=PLAN.devices)  # of ranks 0 and 1
    for rank in range(2):
        slowness.heard(measured(without, rank, 20), without.to_json(), dict)
    assert slowness.speeds() == {1: 0.25, 2: 0.5}
    slowness.confirmed({2: 0.3, 3: 0.6})
    assert slowness.speeds() == {1: 0.25, 2: 0.3, 3: 0.6}
    back = replace(PLAN, version=2)
    slowness.heard(measured(back, 0, 21), back.to_json(), dict)
    assert slowness.speeds() == {1: 0.25, 2: 0.3, 3: 0.6}
    slowness.confirmed({1: 1.0})
    slowness.forget([3])
    assert slowness.speeds() == {2: 0.3}


def test_questions_for_whose_answers_nobody_waits_come_last() -> None:
    job = Adapted()
    need = job.rules.job.question("a", range(4), patient=True)
    planner = PlannerProcess()
    first, second = object(), object()
    planner._urgent.extend([(need, first), (replace(need, patient=False), second)])  # type: ignore[list-item]
    assert [planner._next_urgent()[1] for _ in range(2)] == [second, first]  # type: ignore[index]
    assert planner._next_urgent() is None


def test_a_problem_without_terms_is_none() -> None:
    job = Adapted()
    for problem in ("{}", "[]", "nonsense", json.dumps({"act": {"colour": 1}})):
        job.rules.job.speeds.described(problem)
        assert job.rules.job.speeds.terms is None
