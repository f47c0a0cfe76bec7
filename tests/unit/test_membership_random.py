"""The coordinator's rules under chance: the job runs on, or it ends for a reason."""

from __future__ import annotations

from random import Random

import pytest
from simulated_job import NEVER, SimulatedJob

from resihp_ext.control import messages as say
from resihp_ext.control.membership import Phase
from resihp_ext.errors import EXIT_OK, EXIT_REQUEUE

pytestmark = pytest.mark.unit

QUIET_S = 200.0
"""Longer than all deadlines that may follow one another."""
STEPS_S = 30.0


def trouble(job: SimulatedJob, random: Random) -> None:
    """Something bad, or a person's command."""
    living = [one for one in job.workers.values() if one.alive and not one.hung]
    there = [name for name in job.rules.job.slots.nodes if name not in job.gone]
    kind = random.choices(
        ["die", "hang", "connection", "lose", "come", "drain", "readmit"], [10, 2, 3, 2, 4, 2, 2]
    )[0]
    if kind in ("die", "hang", "connection") and living:
        one = random.choice(living)
        if kind == "die":
            job.die(one.rank)
        elif kind == "hang":
            one.hung = True
        elif one.mode in ("train", "change", "rebuild") and not one.newcomer:
            one.troubled_s = job.now_s
            one.send(say.Troubled(rank=one.rank, epoch=one.epoch, text="reset"))
    elif kind == "lose" and len(there) > 1:
        job.lose(random.choice(there))
    elif kind == "come":
        gone = sorted(job.gone)
        job.join(int(random.choice(gone)[1:]) if gone else len(job.rules.job.slots.nodes), ())
    elif kind in ("drain", "readmit") and there:
        job.act(getattr(job.rules, kind)(random.choice(there)))


def check(job: SimulatedJob) -> None:
    """What holds at any time."""
    for told in (job.views, job.goes):
        assert all(len(same) == 1 for same in told.values()), told
    known = job.rules.job
    assert known.epoch <= known.issued


@pytest.mark.parametrize("seed", range(40))
def test_a_job_gets_back_to_running_or_ends_for_a_reason(seed: int) -> None:
    random = Random(seed)
    job = SimulatedJob(random, nodes=random.randint(1, 3), each=random.randint(1, 4))
    job.advance(5.0)
    assert job.rules.job.phase is Phase.RUNNING
    for _ in range(random.randint(1, 25)):
        job.advance(random.choice([0.0, 0.1, 0.5, 3.0, 20.0]) * random.random())
        if job.ended is not None:
            break
        trouble(job, random)
        check(job)
    job.advance(QUIET_S)
    check(job)
    if job.ended is not None:
        assert job.ended.exit_code == EXIT_REQUEUE
        assert "no worker is left" in job.ended.cause or "no node is left" in job.ended.cause
        return
    assert job.rules.job.phase in (Phase.RUNNING, Phase.CHANGING)
    before = {rank: job.workers[rank].done for rank in job.rules.job.members}
    job.advance(STEPS_S)
    here = [rank for rank in job.rules.job.members if rank in before]
    assert all(job.workers[rank].done > before[rank] for rank in here)
    assert not [one for one in job.workers.values() if one.hung and one.rank in here]


@pytest.mark.parametrize("seed", range(15))
def test_every_loss_of_a_member_is_told_to_the_others(seed: int) -> None:
    random = Random(seed)
    job = SimulatedJob(random, nodes=2, each=4)
    job.advance(5.0)
    lost = set()
    for rank in random.sample(range(8), 5):
        if job.workers[rank].alive and rank in job.rules.job.members:
            job.die(rank)
            lost.add((rank, "was killed"))
        job.advance(random.choice([0.1, 3.0]) * random.random())
    job.advance(QUIET_S)
    assert job.rules.job.phase is Phase.RUNNING
    assert lost
    assert lost <= job.reported


@pytest.mark.parametrize("seed", range(25))
def test_a_job_that_comes_to_its_end_ends(seed: int) -> None:
    """Also when some die while others have left already."""
    random = Random(seed)
    job = SimulatedJob(random, nodes=2, each=2, end_at=random.randint(5, 40))
    job.advance(2.5)
    for _ in range(random.randint(0, 3)):
        job.advance(random.choice([0.5, 3.0]) * random.random())
        living = [rank for rank, one in job.workers.items() if one.alive]
        if living and job.ended is None:
            job.die(random.choice(living))
    job.advance(2 * QUIET_S)
    assert job.ended is not None
    finished = any(one.left and one.done >= one.end_at for one in job.workers.values())
    assert job.ended.exit_code == (EXIT_OK if finished else EXIT_REQUEUE), job.ended


def test_too_few_devices_end_the_job_together() -> None:
    for seed in range(20):
        job = SimulatedJob(Random(seed), nodes=1, each=4, least=4)
        job.advance(5.0)
        job.die(seed % 4)
        job.advance(QUIET_S)
        assert job.ended is not None
        assert job.ended.exit_code == EXIT_REQUEUE
        assert "no layout fits what is left" in job.ended.cause
        assert not any(one.alive for one in job.workers.values())


def test_newcomers_are_taken_in_under_load() -> None:
    job = SimulatedJob(Random(1), nodes=2, each=4, end_at=NEVER)
    job.advance(5.0)
    job.lose("n1")
    job.advance(20.0)
    assert job.rules.job.members == (0, 1, 2, 3)
    job.join(1, ())
    job.advance(60.0)
    assert job.rules.job.members == tuple(range(8))
    assert {one.held.pop() for one in job.workers.values()} == {job.rules.job.plan.version}
