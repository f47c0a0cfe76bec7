"""The coordinator's rules: losses, and how an epoch gathers the survivors."""

from __future__ import annotations

import pytest
from coordinated import ZERO_S, running

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Prepare
from resihp_ext.control.membership import Phase
from resihp_ext.control.planner import what_may_happen
from resihp_ext.errors import EXIT_GIVE_UP, EXIT_REQUEUE

pytestmark = pytest.mark.unit


# A loss


def test_a_loss_gathers_the_others_and_tells_all_the_same() -> None:
    job = running()
    job.die(3, "was killed by signal 9 (SIGKILL)")
    views = job.said(say.View)
    assert views.keys() == {0, 1, 2}
    (view,) = set(views.values())
    assert view.members == (0, 1, 2)
    assert view.losses == (
        say.Loss(rank=3, cause="was killed by signal 9 (SIGKILL)", time_s=ZERO_S + job.now_s),
    )
    assert [usable for _, _, usable in job.need().devices] == [True, True, True, False]
    job.plan()
    job.arrive(0, 1)
    assert job.said(say.Go) == {}
    job.arrive(2)
    goes = job.said(say.Go)
    assert goes.keys() == {0, 1, 2}
    (go,) = set(goes.values())
    assert (go.epoch, go.version) == (view.epoch, 0)
    assert go.reason == "rank 3 was killed by signal 9 (SIGKILL)"
    job.adopt(0, 1, 2)
    assert job.phase is Phase.RUNNING
    assert job.told(say.Replace) == [("n1", say.Replace(rank=3, incarnation=1))]
    (ahead,) = [one.need for one in job.actions if isinstance(one, Prepare)]
    assert [usable for _, _, usable in ahead.devices] == [True, True, True, False]
    assert ahead.plan == go.plan


def test_the_question_after_a_loss_is_one_that_was_thought_of() -> None:
    job = running()
    ahead = next(one.need for one in job.actions if isinstance(one, Prepare))
    job.die(2)
    thought = {(one.devices, one.problem, one.plan) for one in what_may_happen(ahead)}
    asked = job.need()
    assert (asked.devices, asked.problem, asked.plan) in thought


def test_the_furthest_finished_stretch_counts() -> None:
    job = running()
    job.die(3)
    job.plan()
    job.arrive(0, 2, region=7)
    job.arrive(1, region=8)
    go = job.said(say.Go)[0]
    assert (go.region, go.result) == (8, (8.0, 1.0))


@pytest.mark.parametrize("told", [False, True])
def test_a_loss_during_recovery_begins_the_next_epoch(told: bool) -> None:
    job = running()
    job.die(3)
    job.arrive(0, 1, 2)
    if told:
        job.plan()
        job.adopt(0)
    before = job.rules.job.epoch
    job.die(2)
    view = job.said(say.View)[0]
    assert view.epoch > before
    assert [loss.rank for loss in view.losses] == [3, 2]
    job.recover()
    assert job.members == (0, 1)


def test_an_answer_for_an_older_epoch_is_not_taken() -> None:
    job = running()
    job.die(3)
    old = job.need()
    job.die(2)
    job.arrive(0, 1)
    assert job.plan(old) == []
    job.plan()
    assert job.said(say.Go).keys() == {0, 1}
    assert job.need().version > old.version


def test_words_of_an_older_epoch_are_not_taken() -> None:
    job = running()
    job.die(3)
    job.plan()
    late = say.Arrived(rank=0, epoch=0, region=9, result=(), versions=(0,), phase="")
    job.hear(late)
    job.arrive(1, 2)
    assert job.said(say.Go) == {}


def test_who_does_not_arrive_is_killed_and_left_behind() -> None:
    job = running()
    job.die(3)
    job.plan()
    job.arrive(0, 1)
    job.wait(29.0)
    assert job.told(say.Kill) == []
    job.wait(1.25)
    assert job.told(say.Kill) == [("n1", say.Kill(rank=2, cause="did not arrive within 30 s"))]
    job.die(2)
    assert job.said(say.View)[0].losses[-1].cause == "did not arrive within 30 s"
    job.recover()
    assert job.members == (0, 1)


def test_a_process_that_cannot_be_killed_is_taken_for_dead() -> None:
    job = running()
    job.die(3)
    job.plan()
    job.arrive(0, 1)
    job.wait(41.0)
    assert job.said(say.View)[0].members == (0, 1)
    ghost = say.Arrived(rank=2, epoch=2, region=9, result=(), versions=(0,), phase="")
    job.hear(ghost)
    job.recover()


def test_who_does_not_adopt_is_found_by_gathering_anew() -> None:
    job = running()
    job.die(3)
    job.arrive(0, 1, 2)
    job.plan()
    job.adopt(0, 1)
    job.wait(60.0)
    assert job.said(say.View).keys() == {0, 1, 2}
    job.plan()
    job.arrive(0, 1, versions=(1,))
    job.wait(30.0)
    assert [kill.rank for _, kill in job.told(say.Kill)] == [2]
    job.die(2)
    job.recover(versions=(1,))


def test_no_plan_asks_for_more_devices() -> None:
    job = running()
    job.die(3)
    job.refuse("4 layers need 4 devices")
    job.arrive(0, 1, 2)
    cause = "no layout fits what is left (rank 3 was killed): 4 layers need 4 devices"
    goes = job.said(say.Go)
    assert goes.keys() == {0, 1, 2}
    assert {(go.exit_code, go.last) for go in goes.values()} == {(EXIT_REQUEUE, cause)}
    for rank in (0, 1, 2):
        job.hear(say.Leaving(rank=rank, exit_code=EXIT_REQUEUE, checkpoint=f"as {rank} has saved"))
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_REQUEUE
    assert job.ended.cause == f"{cause}; as 0 has saved; start it again with --load to go on"


def test_a_planner_that_never_answers_ends_the_job() -> None:
    job = running()
    job.die(3)
    job.arrive(0, 1, 2)
    job.wait(61.0)
    goes = job.said(say.Go)
    assert goes.keys() == {0, 1, 2}
    assert all("no answer of the planner" in go.last for go in goes.values())


def test_the_same_failure_again_and_again_is_given_up() -> None:
    job = running(2, 8)
    for rank in range(10, 15):
        job.die(rank)
        job.recover(region=7)
    job.die(15)
    job.arrive(*job.members)
    job.plan()
    goes = job.said(say.Go)
    assert goes.keys() == set(job.members)
    assert {go.exit_code for go in goes.values()} == {EXIT_GIVE_UP}
    assert all("6 failures in a row" in go.last for go in goes.values())


def test_progress_between_failures_is_all_that_is_asked() -> None:
    job = running(2, 8)
    for rank in range(8, 16):
        job.die(rank)
        job.recover(region=rank)
    assert job.phase is Phase.RUNNING


def test_nodes_lost_one_by_one_are_no_failure_of_the_job() -> None:
    job = running(9, 1)
    for node in range(1, 9):
        job.lose(node)
        job.recover(region=7)
    assert job.members == (0,)


def test_all_workers_of_the_only_node_dead() -> None:
    job = running(1, 2)
    job.die(0)
    job.die(1)
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_REQUEUE
    assert job.ended.cause == (
        "rank 0 was killed; rank 1 was killed; no worker is left; "
        "start it again with --load to go on"
    )


def test_a_lost_node_is_one_loss() -> None:
    job = running()
    job.lose(1)
    assert job.said(say.View)[0].members == (0, 1)
    assert job.rules.job.epoch == 1
    assert job.die(2) == []
    job.recover()
    assert job.told(say.Replace) == []


def test_a_node_that_comes_back_gets_its_ranks_again() -> None:
    job = running()
    job.lose(1)
    job.recover()
    job.come(1)
    assert job.told(say.Assigned) == [("n1", say.Assigned(ranks=(2, 3)))]
    job.prepare(2, 3)
    assert job.need().devices[2:] == ((2, 1, True), (3, 1, True))
    # Its agent counts processes anew.
    job.hear(say.Exited(rank=3, incarnation=0, cause="was killed", exit_code=-9))
    assert job.told(say.Replace) == [("n1", say.Replace(rank=3, incarnation=1))]


def test_a_new_node_gets_ranks_that_nobody_has() -> None:
    job = running()
    job.come(7)
    assert job.told(say.Assigned) == [("n7", say.Assigned(ranks=(4, 5)))]


def test_a_new_node_takes_the_place_of_a_lost_one() -> None:
    job = running()
    job.lose(1)
    job.recover()
    job.come(7)
    assert job.told(say.Assigned) == [("n7", say.Assigned(ranks=(2, 3)))]
    job.come(1)
    assert job.told(say.Assigned) == [("n1", say.Assigned(ranks=(4, 5)))]
    job.prepare(2, 3, 4, 5)
    assert job.need().devices[2:] == ((2, 1, True), (3, 1, True), (4, 2, True), (5, 2, True))


def test_a_node_that_comes_too_late_is_sent_away() -> None:
    job = running()
    job.rules.job.slots.nodes.pop("n1")
    job.join(1)
    assert [node for node, _ in job.told(say.EndNode)] == ["n1"]
    job = running(1, 1)
    job.hear(say.Leaving(rank=0, exit_code=0))
    job.come(4)
    assert [node for node, _ in job.told(say.EndNode)] == ["n4"]


# Connections


def test_a_lost_connection_without_a_loss_gathers_all() -> None:
    job = running()
    job.hear(say.Troubled(rank=2, epoch=0, text="connection reset"))
    assert job.wait(0.25) == []
    job.wait(0.25)
    view = job.said(say.View)[0]
    assert (view.members, view.losses) == ((0, 1, 2, 3), ())
    job.arrive(0, 1, 2, 3)
    job.plan()
    assert job.said(say.Go)[0].reason == "rank 2 cannot go on: connection reset"


def test_a_loss_explains_a_lost_connection() -> None:
    job = running()
    job.hear(say.Troubled(rank=2, epoch=0, text="reset"))
    job.die(3)
    assert job.rules.job.epoch == 1
    job.hear(say.Troubled(rank=1, epoch=0, text="reset"))
    assert job.wait(5.0) == []


def test_trouble_while_a_plan_is_taken_up_gathers_anew() -> None:
    job = running()
    job.die(3)
    job.arrive(0, 1, 2)
    job.plan()
    job.hear(say.Troubled(rank=2, epoch=1, text="reset"))
    job.wait(0.5)
    assert job.said(say.View).keys() == {0, 1, 2}


def test_trouble_between_agreement_and_change_gathers_anew() -> None:
    job = running()
    job.come(2)
    job.prepare(4, 5)
    job.plan()
    job.agree(1)
    job.hear(say.Troubled(rank=2, epoch=0, text="reset"))
    job.wait(0.5)
    assert {0, 1, 2, 3} <= job.said(say.View).keys()


@pytest.mark.parametrize("changing", [False, True])
def test_stuck_members_repeat_what_they_were_at(changing: bool) -> None:
    job = running()
    if changing:
        job.come(2)
        job.prepare(4, 5)
        job.plan()
        job.agree(1)
    job.take(job.rules.stuck("all ranks have waited for 60 s"))
    assert {0, 1, 2, 3} <= job.said(say.View).keys()
