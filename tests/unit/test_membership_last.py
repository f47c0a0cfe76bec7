"""The coordinator's rules when a job cannot go on: members save what they hold, and stop."""

from __future__ import annotations

import pytest
from coordinated import running, some_plan

from resihp_ext.control import messages as say
from resihp_ext.control.job_state import KnownPlan
from resihp_ext.control.membership import Phase
from resihp_ext.errors import EXIT_REQUEUE
from resihp_ext.plan.plan import Plan

pytestmark = pytest.mark.unit


def test_the_last_layout_only_has_to_hold_the_state() -> None:
    job = running()
    job.rules.job.plan = KnownPlan.of(some_plan(0, range(4), num_layers=5))
    job.die(1)
    job.refuse()
    job.arrive(0, 2, 3, versions=(0,))
    plan = Plan.from_json(job.said(say.Go)[0].plan)
    (replica,) = plan.replicas
    assert [(one.ranks, one.layers) for one in replica.stages] == [
        ((0,), (0, 1)),
        ((2,), (1, 3)),
        ((3,), (3, 5)),
    ]
    assert plan.version > 0


def test_when_one_is_lost_while_the_last_checkpoint_is_saved_the_others_stop() -> None:
    job = running()
    job.die(3)
    job.refuse()
    job.arrive(0, 1, 2)
    job.die(1)
    stops = job.said(say.Stop)
    assert stops.keys() == {0, 2}
    assert {stop.exit_code for stop in stops.values()} == {EXIT_REQUEUE}
    for rank in (0, 2):
        job.hear(say.Leaving(rank=rank, exit_code=EXIT_REQUEUE))
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_REQUEUE


def test_newcomers_that_end_do_not_disturb_the_last_checkpoint() -> None:
    job = running()
    job.die(3)
    job.recover()
    job.die(0)
    job.refuse()
    job.arrive(1, 2)
    assert job.said(say.Go).keys() == {1, 2}
    assert job.state(3) == "preparing"
    assert job.die(3) == []
    job.die(1)
    assert job.said(say.Stop).keys() == {2}


def test_a_last_checkpoint_that_takes_for_ever_is_not_waited_for() -> None:
    job = running()
    job.die(3)
    job.refuse()
    job.arrive(0, 1, 2)
    assert job.wait(job.rules.job.rules.files_s - 1.0) == []
    job.wait(2.0)
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_REQUEUE


def test_who_loads_a_checkpoint_is_given_time() -> None:
    job = running()
    job.die(3)
    job.arrive(0, 1, 2)
    job.plan()
    job.wait(50.0)
    for rank in (0, 1, 2):
        job.hear(say.Loading(rank=rank, epoch=job.rules.job.epoch))
    assert job.wait(300.0) == []
    job.adopt(0, 1, 2)
    assert job.phase is Phase.RUNNING


def test_without_any_common_state_it_must_come_from_elsewhere() -> None:
    job = running()
    job.die(3)
    job.arrive(0, 1, versions=(1,))
    job.arrive(2, versions=(2,))
    job.plan()
    assert not any(go.whole for go in job.said(say.Go).values())
    job.adopt(0, 1, 2)
    assert job.phase is Phase.RUNNING


def test_a_member_that_cannot_go_on_says_why_for_all() -> None:
    job = running()
    job.hear(say.Leaving(rank=2, exit_code=EXIT_REQUEUE, cause="the state is lost"))
    assert {stop.cause for stop in job.said(say.Stop).values()} == {"the state is lost"}
