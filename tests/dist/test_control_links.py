"""Links between real processes: what is said arrives, and a death is seen at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from control_peers import (
    Owner,
    SmallRules,
    Worker,
    agent,
    coordinator,
    limits,
    node_hello,
)

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, ToRank
from resihp_ext.control.frames import new_token
from resihp_ext.control.hang import HangRules
from resihp_ext.control.node import NodeControl
from resihp_ext.control.server import CoordinatorServer

pytestmark = pytest.mark.dist


class Job:
    """One coordinator, one agent, and the workers that a test starts."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self.token = new_token()
        self.path = folder / "agent.sock"
        self.rules, self.owner = SmallRules(), Owner()
        self._stack = stack
        self.server: CoordinatorServer
        self.node: NodeControl

    def open(self, **changed: object) -> Job:
        self.server = self._stack.enter_context(coordinator(self.token, self.rules))
        control = agent(self.token, self.path, self.owner, changed=limits(**changed))
        self.node = self._stack.enter_context(control)
        self.node.join(*self.server.address, node_hello())
        return self

    def worker(self, rank: int, incarnation: int = 0, phase: str = "forward") -> Worker:
        made = Worker(self.path, self.token, rank, incarnation, phase)
        self._stack.callback(made.end)
        assert made.said() == {"started": made.pid}
        self.owner.wait("greeted", lambda hello: hello.rank == rank)
        return made

    def settle(self, *workers: Worker) -> None:
        """Waits until the agent knows that these have left their first steps behind."""
        for worker in workers:
            worker.tell("settle")
            worker.send(say.Ready(rank=worker.rank))  # in order: comes after the progress
            self.rules.heard(say.Ready, rank=worker.rank)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(stack, tmp_path)


def view_of(epoch: int) -> Callable[[say.Armed], list[Action]]:
    view = say.View(epoch=epoch, members=(0, 1), losses=())
    return lambda _: [ToRank(0, view), ToRank(1, view)]


def test_words_go_up_and_down(job: Job) -> None:
    job.open()
    job.rules.answers[say.Armed] = view_of(3)
    workers = [job.worker(0), job.worker(1)]
    job.rules.heard(say.Hello, rank=1)
    workers[0].send(say.Armed(rank=0))
    for worker in workers:
        found = worker.said()
        assert (found["got"], found["epoch"]) == ("View", 3)
    _, beat = job.rules.heard(say.NodeBeat, alive=(0, 1))
    assert beat.node == "a"


def test_order_is_kept_and_nothing_lost(job: Job) -> None:
    job.open()
    worker = job.worker(0)
    for version in range(200):
        worker.send(say.Adopted(rank=0, epoch=1, version=version))
    got = [job.rules.heard(say.Adopted)[1].version for _ in range(200)]
    assert got == list(range(200))


def test_large_plan_comes_and_goes(job: Job) -> None:
    """Limits of strangers hold no longer for those who have proved who they are."""
    job.open()
    plan = "p" * (8 * 1024 * 1024)
    go = say.Go(epoch=1, plan=plan, region=0, result=(), version=1, reason="")
    job.rules.answers[say.Described] = lambda _: [ToRank(0, go)]
    sent = Worker.python(
        job.path,
        job.token,
        f"link.send(say.Described(rank=0, problem='', plan='p' * {len(plan)}))\n"
        "wait_for(lambda: any(getattr(m, 'plan', '') == 'p' * (8 << 20) for m in got))",
    )
    assert sent.wait(timeout=30) == 0
    _, described = job.rules.heard(say.Described)
    assert described.plan == plan


def test_killed_worker_is_noticed_at_once(job: Job) -> None:
    job.open()
    job.worker(0)
    worker = job.worker(1)
    killed_s = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    at_s, args = job.owner.wait("gone")
    assert args == (1, 0)
    assert at_s - killed_s < 0.1
    job.node.exited(1, 0, "was killed by signal 9 (SIGKILL)", -9)
    at_s, exited = job.rules.heard(say.Exited)
    assert at_s - killed_s < 0.2
    assert exited == say.Exited(
        rank=1, incarnation=0, cause="was killed by signal 9 (SIGKILL)", exit_code=-9
    )
    job.rules.heard(say.NodeBeat, alive=(0,))


def test_killed_worker_is_noticed_though_its_child_lives(job: Job) -> None:
    """A data loader's worker, forked by the rank, must not hold the rank's link open."""
    job.open()
    worker = job.worker(0)
    worker.tell("fork 1")
    worker.send(say.Armed(rank=0))  # comes after the fork, on the parent's link: it still works
    job.rules.heard(say.Armed)
    killed_s = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)
    at_s, _ = job.owner.wait("gone")
    assert at_s - killed_s < 0.1


def test_last_words_come_before_the_end(job: Job) -> None:
    job.open()
    for incarnation in range(5):
        worker = job.worker(0, incarnation)
        worker.send(say.Leaving(rank=0, exit_code=0))
        worker.tell("close")
        # The launcher may well be the first to see the end.
        job.node.exited(0, incarnation, "exited with code 0", 0)
        job.rules.wait("handle", lambda message, _: isinstance(message, say.Leaving))
        job.rules.heard(say.Exited, incarnation=incarnation)


def test_exit_of_a_worker_that_never_spoke_is_told(job: Job) -> None:
    job.open()
    job.node.started(1, 0)
    job.node.exited(1, 0, "exited with code 1", 1)
    job.rules.heard(say.Exited, rank=1, exit_code=1)


def test_stopped_worker_is_killed_with_its_cause(job: Job) -> None:
    job.open(hang=HangRules(silence_s=1.0))
    job.worker(0, phase="checkpoint")
    worker = job.worker(1, phase="checkpoint")
    stopped_s = time.monotonic()
    os.kill(worker.pid, signal.SIGSTOP)
    at_s, (rank, cause) = job.owner.wait("kill")
    assert rank == 1
    assert "the process is stopped" in cause
    assert 0.9 < at_s - stopped_s < 2.0
    job.node.exited(1, 0, "was killed by signal 9 (SIGKILL)", -9)
    assert job.rules.heard(say.Exited)[1].cause == cause


def test_interpreter_kept_by_one_call_is_silence(job: Job) -> None:
    job.open(hang=HangRules(silence_s=1.0))
    worker = job.worker(0)
    job.settle(worker)
    worker.tell("hold 20")
    _, (rank, cause) = job.owner.wait("kill")
    assert rank == 0
    assert "phase forward" in cause


def test_hung_worker_is_killed_and_its_victim_is_not(job: Job) -> None:
    job.open(hang=HangRules(floor_s=1.0))
    victim, hung = job.worker(0), job.worker(1)
    job.settle(victim, hung)
    victim.tell("wait")
    hung.tell("stand")
    _, (rank, cause) = job.owner.wait("kill")
    assert rank == 1
    assert "made no progress" in cause
    hung.tell("move")
    job.owner.none("kill", 1.5)
    hung.tell("stand")
    assert job.owner.wait("kill")[1][0] == 1


def test_all_who_wait_are_the_coordinators_case(job: Job) -> None:
    job.open(hang=HangRules(floor_s=0.5, stuck_floor_s=1.0))
    workers = [job.worker(0), job.worker(1)]
    job.settle(*workers)
    workers[0].tell("wait")
    workers[1].tell("move")
    job.rules.none("stuck", 1.5)
    workers[1].tell("wait")
    _, (cause,) = job.rules.wait("stuck")
    assert "all ranks have waited" in cause
    job.owner.none("kill", 0.5)


def test_old_process_does_not_come_back(job: Job) -> None:
    job.open()
    job.node.started(0, 2)
    old = Worker(job.path, job.token, 0, incarnation=1)
    assert [old.said(), old.said()] == [{"started": old.pid}, {"lost": True}]
    old.end()
    assert job.node.counters.as_dict() == {"old process": 1}


def test_worker_whose_agent_is_gone_hears_of_it(job: Job) -> None:
    job.open()
    worker = job.worker(0)
    job.node.close()
    assert worker.said() == {"lost": True}


def test_wait_for_an_agent_that_is_not_there_is_bounded(job: Job) -> None:
    lonely = Worker(job.path, job.token, 0)
    assert lonely.said() == {}
    assert "ResiHPError" in lonely.end()
