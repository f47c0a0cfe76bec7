"""What the coordinator's status says of plan, standby ranks and losses."""

from __future__ import annotations

import pytest
from coordinated import Driver, running, some_plan

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Answer

pytestmark = pytest.mark.unit


def lost(job: Driver) -> dict[str, int]:
    found: dict[str, int] = job.rules.status()["lost"]
    return found


def test_losses_are_counted_by_kind() -> None:
    job = running(5, 2)
    assert lost(job) == {}
    job.die(1, "was killed by signal 9 (SIGKILL)")
    assert lost(job) == {"signal": 1}
    job.recover()
    job.die(2, "exited with code 1", exit_code=1)
    job.recover()
    job.die(4, "made no progress for 31.0 s in step 3, phase forward")
    job.recover()
    job.lose(4)
    job.recover()
    assert lost(job) == {"signal": 1, "exit": 1, "hang": 1, "node": 2}


def test_who_comes_too_late_has_hung() -> None:
    """Told to end, it is counted once, whether its end is heard of or not."""
    job = running()
    job.die(3, "was killed by signal 9 (SIGKILL)")
    job.arrive(0, 1)
    job.wait(job.rules.job.rules.arrive_s + 1)
    assert [message.rank for _, message in job.told(say.Kill)] == [2]
    job.die(2, "was killed by signal 9 (SIGKILL)")
    assert lost(job) == {"signal": 1, "hang": 1}

    job = running()
    job.die(3, "was killed by signal 9 (SIGKILL)")
    job.arrive(0, 1)
    rules = job.rules.job.rules
    job.wait(rules.arrive_s + rules.kill_s + 1)
    assert lost(job) == {"signal": 1, "hang": 1}


def test_who_ends_with_the_job_is_not_lost() -> None:
    job = running()
    job.hear(say.Leaving(rank=0, exit_code=1))
    job.die(3, "was killed by signal 9 (SIGKILL)")
    assert lost(job) == {}


def test_the_plan_and_who_stands_by() -> None:
    job = Driver()
    assert (job.rules.status()["plan"], job.rules.status()["standby"]) == (None, [])
    job.start()
    assert (job.rules.status()["plan"], job.rules.status()["standby"]) == (0, [])
    job.die(3)
    job.arrive(0, 1, 2)
    need = job.need()
    job.take(
        job.rules.planned(need.request, Answer(some_plan(need.version, (0, 2)), "", need.version))
    )
    job.adopt(0, 1, 2)
    status = job.rules.status()
    assert (status["plan"], status["members"], status["standby"]) == (1, [0, 1, 2], [1])
