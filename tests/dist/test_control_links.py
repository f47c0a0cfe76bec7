"""Links between real processes: what is said arrives, and a death is seen at once."""

from __future__ import annotations

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
    job.node.exited(1, 0, "was killed by signal 9 (SIGKILL)", -9)
