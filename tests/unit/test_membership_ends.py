"""The coordinator's rules: how a job begins and how it ends."""

from __future__ import annotations

import pytest
from coordinated import ZERO_S, Driver, running

from resihp_ext.control import messages as say
from resihp_ext.control.membership import Phase, Rules
from resihp_ext.errors import EXIT_FAILURE, EXIT_REQUEUE, EXIT_USAGE

pytestmark = pytest.mark.unit


# Before the first step


def test_the_job_runs_once_all_that_begin_together_are_armed() -> None:
    job = Driver(2, 2)
    for rank in (0, 1, 2):
        job.hear(say.Armed(rank=rank))
        assert job.phase is Phase.STARTING
    job.hear(say.Armed(rank=3))
    assert job.phase is Phase.RUNNING
    assert job.members == (0, 1, 2, 3)


def test_a_node_that_has_not_come_yet_is_waited_for() -> None:
    job = Driver(1, 2)
    job.nodes = 2
    job.rules = type(job.rules)(zero_s=ZERO_S)
    job.join(0)
    job.hear(say.Armed(rank=0))
    job.hear(say.Armed(rank=1))
    assert job.phase is Phase.STARTING
    job.join(1)
    job.hear(say.Armed(rank=2))
    job.hear(say.Armed(rank=3))
    assert job.phase is Phase.RUNNING


def test_a_death_restarts_all_once_however_many_follow() -> None:
    job = Driver(2, 2)
    job.die(1)
    assert [node for node, _ in job.told(say.Restart)] == ["n0", "n1"]
    for rank in (0, 2, 3):
        assert job.die(rank) == []
    for node in (0, 1):
        job.join(node)
    # The last words of old processes may come late.
    old = say.Exited(rank=2, incarnation=0, cause="was killed", exit_code=-9)
    assert job.hear(old) == []
    job.start()
    assert job.rules.job.restarts == 1


def test_restarts_are_bounded() -> None:
    job = Driver(2, 1, Rules(restarts=2))
    for _ in range(2):
        job.die(1)
        assert job.told(say.Restart)
        job.join(0)
        job.join(1)
    job.die(0)
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_FAILURE
    assert job.ended.cause == "rank 0 was killed before the first step"


def test_a_usage_error_is_not_tried_again() -> None:
    job = Driver()
    job.die(1, "exited with code 2", EXIT_USAGE)
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_USAGE


def test_a_job_with_nothing_to_do_ends_well() -> None:
    job = Driver(1, 2)
    job.hear(say.Leaving(rank=0, exit_code=0))
    job.die(1, "exited with code 0", 0)
    assert job.ended is not None
    assert job.ended.exit_code == 0


def test_a_job_that_is_stuck_at_its_start_is_restarted() -> None:
    job = Driver()
    job.take(job.rules.stuck("all ranks have waited for 1800 s"))
    assert len(job.told(say.Restart)) == 2


def test_the_last_node_before_the_first_step() -> None:
    job = Driver(1, 2)
    job.lose(0)
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_REQUEUE


# The end


def test_when_all_members_have_left_the_job_is_over() -> None:
    job = running()
    for rank in (0, 1, 2):
        job.hear(say.Leaving(rank=rank, exit_code=0))
        job.die(rank, "exited with code 0", 0)
        assert job.ended is None
    job.hear(say.Leaving(rank=3, exit_code=0))
    assert job.ended is not None
    assert job.ended.exit_code == 0
    assert [node for node, _ in job.told(say.EndNode)] == ["n0", "n1"]


def test_a_death_after_the_end_is_no_failure() -> None:
    """Whoever leaves has met all others at the end."""
    job = running()
    job.hear(say.Leaving(rank=0, exit_code=0))
    job.die(3)
    assert {stop.exit_code for stop in job.said(say.Stop).values()} == {0}
    job.hear(say.Leaving(rank=1, exit_code=0))
    job.hear(say.Leaving(rank=2, exit_code=0))
    assert job.ended is not None
    assert job.ended.exit_code == 0


def test_one_leaves_at_the_end_while_the_others_are_gathered() -> None:
    job = running()
    job.die(3)
    job.arrive(1)
    job.hear(say.Leaving(rank=0, exit_code=0))
    assert job.said(say.Stop).keys() == {1, 2}
    job.die(1)
    job.die(2)
    assert job.ended is not None
    assert job.ended.exit_code == 0


def test_one_that_ends_with_an_error_ends_the_job() -> None:
    job = running()
    job.hear(say.Leaving(rank=1, exit_code=3))
    assert {stop.exit_code for stop in job.said(say.Stop).values()} == {3}


def test_an_exit_without_a_word_is_a_loss_whatever_its_code() -> None:
    job = running()
    job.die(1, "exited with code 0", 0)
    assert job.said(say.View).keys() == {0, 2, 3}


def test_members_that_do_not_leave_are_ended() -> None:
    job = running()
    job.die(3)
    job.refuse()
    job.hear(say.Leaving(rank=0, exit_code=EXIT_REQUEUE))
    job.wait(59.0)
    assert job.ended is None
    job.wait(1.0)
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_REQUEUE
    assert len(job.told(say.EndNode)) == 2


def test_a_job_that_is_told_to_stop_and_loses_all_ends() -> None:
    job = running()
    job.die(3)
    job.refuse()
    job.lose(1)
    job.lose(0)
    assert job.ended is not None
    assert job.ended.exit_code == EXIT_REQUEUE


def test_nothing_follows_the_end() -> None:
    job = running(1, 2)
    for rank in (0, 1):
        job.hear(say.Leaving(rank=rank, exit_code=0))
    assert job.lose(0) == []
    assert job.wait(100.0) == []
    assert job.take(job.rules.stuck("x")) == []


def test_a_rank_speaks_through_its_own_node_only() -> None:
    job = running()
    message = say.Exited(rank=3, incarnation=0, cause="was killed", exit_code=-9)
    assert job.hear(message, "n0") == []


def test_status_tells_of_every_rank() -> None:
    job = running()
    job.die(3, "was killed")
    status = job.rules.status()
    assert (status["phase"], status["members"]) == ("recovering", [0, 1, 2])
    assert status["nodes"]["n1"]["ranks"]["3"] == {"state": "lost", "cause": "was killed"}


def test_status_tells_of_recoveries() -> None:
    job = running()
    died_s = ZERO_S + job.now_s
    job.die(3, "was killed")
    job.wait(1.0)
    job.die(1, "was killed")
    assert job.rules.status()["under_way"] == "rank 3 was killed; rank 1 was killed"
    job.wait(0.5)
    job.recover()
    status = job.rules.status()
    assert (status["under_way"], status["recoveries"]) == ("", 1)
    assert status["recovered"] == [
        {
            "time_s": died_s,
            "took_s": 1.5,
            "epoch": 2,
            "reason": "rank 3 was killed; rank 1 was killed",
        }
    ]
