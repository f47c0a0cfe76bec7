"""``resihp status``, ``drain`` and ``join`` with the coordinator's real rules behind them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from coordinated import Driver, running

from resihp_ext.commands.drain import drain
from resihp_ext.commands.job import JobOverError, KeptError, LateError
from resihp_ext.commands.join import command, join
from resihp_ext.commands.picture import as_text, ranges
from resihp_ext.commands.waiting import Patience
from resihp_ext.control import messages as say
from resihp_ext.control.ask import Address, Invitation
from resihp_ext.errors import EXIT_REQUEUE, ResiHPError, UserError

pytestmark = pytest.mark.unit

WORDS = ("resihp-run", "--nnodes", "2", "--rdzv-endpoint", "n0:29400", "my train.py", "--lr", "1")


class Played:
    """Stands where ``RunningJob`` does: the rules are real, the network is left out."""

    def __init__(self, job: Driver, **where: Any) -> None:
        self.job, self.directory = job, Path("dir")
        invitation = Invitation(words=WORDS, folder="/home/me")
        address = {"address": "10.0.0.1", "port": 1, "token_file": "dir/coordinator.token"}
        self.where = Address(**{**address, "node": "n0", "invitation": invitation, **where})
        self.alive: dict[str, list[int]] = {}
        self.asked: list[tuple[str, str]] = []
        self.now_s = 0.0
        self.steps: list[Callable[[], object]] = []
        """What happens while a command waits, one after the other."""
        self.said: list[str] = []
        self.notes: list[str] = []

    def status(self) -> dict[str, Any]:
        rest = {
            "step": 7,
            "alive": self.alive,
            "heard_ago_s": {"n0": 0.25, "n1": 1.0},
            "dropped": {},
        }
        return json.loads(json.dumps(self.job.rules.status() | rest))

    def ask(self, verb: str, node: str = "") -> str:
        self.asked.append((verb, node))
        rules = self.job.rules
        self.job.take({"drain": rules.drain, "join": rules.readmit}[verb](node))
        return f"{verb} {node}: done"

    def patience(self, wait_s: float) -> Patience:
        return Patience(wait_s, clock=lambda: self.now_s, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds
        if self.steps:
            self.steps.pop(0)()

    def drain(self, name: str, wait_s: float | None = None) -> list[str]:
        drain(self, name, None if wait_s is None else self.patience(wait_s), self.said.append)  # type: ignore[arg-type]
        return self.said

    def join(self, name: str = "", wait_s: float | None = None) -> list[str]:
        patience = None if wait_s is None else self.patience(wait_s)
        join(self, name, patience, self.said.append, self.notes.append)  # type: ignore[arg-type]
        return self.said


def leave(job: Driver, *ranks: int) -> None:
    for rank in ranks:
        job.hear(say.Leaving(rank=rank, exit_code=0))


def going(job: Driver) -> list[Callable[[], object]]:
    """All that happens until node n1 of two is away."""
    return [
        job.plan,
        lambda: job.agree(1),
        lambda: job.adopt(0, 1, 2, 3),
        job.plan,
        lambda: job.agree(2),
        lambda: [job.adopt(0, 1), leave(job, 2, 3)],
    ]


def away() -> Played:
    """Node n1 of two is drained."""
    played = Played(running())
    played.drain("n1")
    for step in going(played.job):
        step()
    played.said.clear()
    return played


# Drain


def test_a_node_is_drained_and_waited_for() -> None:
    played = Played(running())
    played.alive["n1"] = [2, 3]
    played.steps = [*going(played.job), lambda: played.alive["n1"].pop(0), played.alive.clear]
    assert played.drain("n1", 10.0) == [
        "drain n1: done",
        "step 7: ranks 2-3 are still there (running: ranks 2, 3 drained)",
        "step 7: ranks 2-3 are still there (changing: ranks 2, 3 drained)",
        "step 7: ranks 2-3 are still there (running: ranks 2, 3 drained)",
        "step 7: ranks 2-3 are still there (changing: ranks 2, 3 drained)",
        "step 7: ranks 2-3 are still there (running)",
        "step 7: rank 3 is still there (running)",
        "ranks 2-3 are away: node n1 may be stopped",
    ]
    assert played.asked == [("drain", "n1")]
    assert played.drain("n1")[-1] == "ranks 2-3 are away: node n1 may be stopped"


def test_without_waiting_a_node_is_only_asked() -> None:
    played = Played(running())
    assert played.drain("n1") == ["drain n1: done"]


def test_the_coordinators_node_has_to_stay() -> None:
    played = Played(running(), node="n1")
    played.steps = going(played.job)
    said = played.drain("n1", 10.0)
    assert said[1] == "node n1 hosts the coordinator: its launcher has to go on, without ranks"
    assert said[-1] == "ranks 2-3 are away: node n1 has to stay: it hosts the coordinator"


def test_an_unknown_node_is_not_drained() -> None:
    played = Played(running())
    with pytest.raises(UserError, match=r"no node 'n7' in this job; nodes: n0, n1$"):
        played.drain("n7")
    assert played.asked == []


def test_a_node_that_cannot_be_spared_is_said_so() -> None:
    played = Played(running())
    played.steps = [lambda: played.job.refuse("2 devices are too few")]
    with pytest.raises(KeptError, match="ranks 2, 3 cannot be spared: 2 devices are too few") as e:
        played.drain("n1", 10.0)
    assert "`resihp join dir n1` takes that back" in str(e.value)
    assert e.value.exit_code == 4
    assert len(played.said) == 2


def test_the_only_node_is_refused_at_once() -> None:
    played = Played(running(1, 2))
    with pytest.raises(KeptError, match="no other node would be left"):
        played.drain("n0")
    assert played.said == []


def test_a_node_that_takes_longer_is_said_so() -> None:
    played = Played(running())
    with pytest.raises(LateError, match=r"node n1: ranks 2-3 are still there .*, after 3 s") as e:
        played.drain("n1", 3.0)
    assert (e.value.exit_code, played.now_s) == (5, 3.0)


def test_a_lost_node_needs_no_draining() -> None:
    played = Played(running())
    played.job.lose(1)
    assert played.drain("n1") == ["node n1 is lost: none of its ranks takes part"]
    assert played.asked == []


@pytest.mark.parametrize(
    ("step", "error", "reason"),
    [
        (lambda job: job.rules.readmit("n1"), ResiHPError, "was readmitted in the meantime"),
        (lambda job: job.hear(say.Leaving(rank=0, exit_code=1)), JobOverError, "the job ends: ra"),
        (lambda job: job.rules.job.slots.nodes.pop("n1"), ResiHPError, "no longer in the job"),
    ],
)
def test_what_comes_in_between_ends_the_wait(
    step: Callable[[Driver], object], error: type[ResiHPError], reason: str
) -> None:
    played = Played(running())
    played.steps = [lambda: step(played.job)]
    with pytest.raises(error, match=reason):
        played.drain("n1", 10.0)


def test_a_node_that_dies_on_the_way_is_away() -> None:
    played = Played(running())
    played.steps = [lambda: played.job.lose(1)]
    assert played.drain("n1", 10.0)[-1] == "node n1 is lost: none of its ranks takes part"


def test_nothing_is_asked_of_a_job_that_ends() -> None:
    played = Played(running())
    played.job.hear(say.Leaving(rank=0, exit_code=1))
    for act in (lambda: played.drain("n1"), lambda: played.join("n1"), played.join):
        with pytest.raises(JobOverError, match="the job ends: rank 0 has ended the job"):
            act()


# Join


def test_a_drained_node_takes_part_again() -> None:
    played = away()
    job = played.job
    played.steps = [
        lambda: job.prepare(2, 3),
        job.plan,
        lambda: job.agree(3),
        lambda: job.adopt(0, 1, 2, 3),
    ]
    assert played.join("n1", 10.0) == [
        "join n1: done",
        "step 7: joining, ranks 2-3 are preparing (running)",
        "step 7: joining, ranks 2-3 are ready (running: ranks 2, 3 joined)",
        "step 7: takes part, ranks 2-3 are entering (changing: ranks 2, 3 joined)",
        "ranks 2-3 take part: node n1 is in the job",
    ]


def test_a_quarantined_node_takes_part_again() -> None:
    played = Played(running())
    for _ in range(3):
        played.job.die(3)
        if played.job.phase != "running":
            played.job.recover()
    assert "quarantined" in as_text(played.status())
    assert played.join("n1") == ["join n1: done"]
    with pytest.raises(LateError, match="rank 2 is member, rank 3 is preparing"):
        played.join("n1", 1.0)
    for _ in range(3):
        played.job.die(3)
    assert played.status()["nodes"]["n1"]["quarantined"]


def test_a_node_that_takes_part_already_is_left_alone() -> None:
    played = Played(running())
    assert played.join("n1", 5.0) == ["ranks 2-3 take part: node n1 is in the job"]
    assert played.asked == []


def test_why_newcomers_wait_is_said() -> None:
    played = away()
    played.steps = [lambda: played.job.prepare(2, 3), lambda: played.job.refuse("4 are too many")]
    with pytest.raises(LateError, match=r"ranks 2-3 are ready .running: refused: 4 are too many"):
        played.join("n1", 5.0)


def test_a_new_node_is_told_what_to_run() -> None:
    played = Played(running())
    line = "cd /home/me && resihp-run --nnodes 2 --rdzv-endpoint n0:29400 'my train.py' --lr 1"
    assert played.join() == [line]
    assert len(played.notes) == 1
    with pytest.raises(UserError, match="no node 'n7' in this job; nodes: n0, n1; what to run"):
        played.join("n7")
    assert played.said[1:] == [line]
    played.job.lose(1)
    with pytest.raises(UserError, match="node n1 is lost; what to run"):
        played.join("n1")
    assert played.said[2:] == [line]


def test_the_tokens_file_and_a_local_rendezvous_are_named() -> None:
    words = ("resihp-run", "--rdzv-endpoint", "localhost:29400", "a.py")
    invitation = Invitation(words=words, folder="/a b", needs_token=True)
    played = Played(running(), invitation=invitation, token_file="/d/token", host="box")
    (line,) = played.join()
    assert line.startswith("cd '/a b' && RESIHP_TOKEN=$(cat /d/token) resihp-run ")
    assert played.notes[1] == "its rendezvous is at localhost: nobody but box gets in"


def test_a_job_for_one_node_takes_no_other() -> None:
    played = Played(running(), invitation=Invitation(obstacle="it was started for one node"))
    with pytest.raises(UserError, match="can join this job: it was started for one node"):
        command(played.where)


# Status


def test_the_picture_of_a_job() -> None:
    """Three nodes: one is getting a new process for a dead one, one cannot be spared."""
    job = running(3, 2)
    job.die(3, "was killed by signal 9 (SIGKILL)")
    job.wait(1.5)
    job.recover()
    job.take(job.rules.drain("n2"))
    job.refuse("3 devices are too few")
    lines = as_text(Played(job).status(), host="n0", place="10.0.0.1:4711").splitlines()
    assert lines[0] == "running: step 7, epoch 1, 5 of 6 ranks take part, 1 recovery"
    assert lines[1] == "coordinator: node n0, 10.0.0.1:4711"
    assert lines[3:7] == [
        "node  address  state             heard      ranks",
        "n0    a        takes part        0.2 s ago  0-1 member",
        "n1    a        takes part        1.0 s ago  2 member; 3 preparing",
        "n2    a        cannot be spared  -          4-5 member",
    ]
    assert lines[8] == "refused: ranks 4, 5 cannot be spared: 3 devices are too few"
    assert lines[9] == "last recoveries:"
    assert lines[10].endswith("  1.5 s  rank 3 was killed by signal 9 (SIGKILL)")


def test_the_picture_of_a_recovery_and_of_an_end() -> None:
    job = running()
    job.lose(1)
    text = as_text(Played(job).status())
    assert "\nunder way: ranks 2, 3 are lost with node n1: no beat\n" in text
    assert "2-3 lost (is lost with node n1: no beat)" in text
    job.arrive(0, 1)
    job.refuse()
    lines = as_text(Played(job).status()).splitlines()
    assert lines[0].startswith("stopping: ")
    assert lines[1].startswith(f"ends with exit code {EXIT_REQUEUE}: no layout fits what is left")


def test_nothing_that_a_stranger_says_moves_the_cursor() -> None:
    job = running()
    job.die(3, "said \x1b[2J\nphase: running")
    status = Played(job).status() | {"dropped": {"wrong token": 2}}
    text = as_text(status)
    assert "\x1b" not in text
    assert "\nphase: running" not in text
    assert text.splitlines()[-1] == "dropped messages: wrong token 2"


def test_ranges() -> None:
    assert ranges([7, 0, 2, 1, 9, 10]) == "0-2, 7, 9-10"
    assert ranges([]) == ""
