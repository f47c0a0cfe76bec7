"""Coordinator and agents: lost nodes, leases, refusals, commands of people."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest
from control_peers import Owner, SmallRules, Worker, agent, coordinator, limits, node_hello

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Answer, End, NeedPlan, ToNode
from resihp_ext.control.ask import (
    Address,
    ask,
    parse_address,
    read_address,
    write_address,
    write_token,
)
from resihp_ext.control.frames import new_token
from resihp_ext.control.server import CoordinatorServer, ServerLimits
from resihp_ext.errors import EXIT_REQUEUE, ResiHPError, UserError

pytestmark = pytest.mark.dist

TOKEN = new_token()

AGENT = """
import sys, time
from pathlib import Path
from resihp_ext.control import messages as say
from resihp_ext.control.node import NodeControl, NodeLimits

class Owner:
    def __getattr__(self, name):
        return lambda *args: print(name, *args, flush=True)

control = NodeControl(node="far", token=bytes.fromhex(sys.argv[1]), socket_path=Path(sys.argv[2]),
    owner=Owner(), limits=NodeLimits(beat_s=0.1, look_s=0.05, lease_s=1.0))
control.start()
control.join("127.0.0.1", int(sys.argv[3]),
    say.NodeHello(node="far", address="127.0.0.1", ranks=(0,), slots=1))
print("joined", flush=True)
time.sleep(60)
"""


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def far_agent(stack: ExitStack, folder: Path, port: int) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, TOKEN.hex(), str(folder / "far.sock"), str(port)],
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.communicate)
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline() == "joined\n"
    return process


def test_killed_agent_is_noticed_at_once(stack: ExitStack, tmp_path: Path) -> None:
    rules = SmallRules()
    server = stack.enter_context(coordinator(TOKEN, rules))
    process = far_agent(stack, tmp_path, server.address[1])
    rules.heard(say.NodeBeat)
    killed_s = time.monotonic()
    process.kill()
    at_s, (node, cause) = rules.wait("lost")
    assert at_s - killed_s < 0.1
    assert (node, cause) == ("far", "its agent: connection lost")


def test_stopped_agent_is_lost_and_fences_itself_when_it_wakes(
    stack: ExitStack, tmp_path: Path
) -> None:
    rules = SmallRules()
    patience = ServerLimits(node_silence_s=1.5, tick_s=0.1, lease_every_s=0.2)
    server = stack.enter_context(coordinator(TOKEN, rules, limits=patience))
    process = far_agent(stack, tmp_path, server.address[1])
    rules.heard(say.NodeBeat)
    os.kill(process.pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    at_s, (_, cause) = rules.wait("lost")
    assert "silent for" in cause
    assert 1.3 < at_s - stopped_s < 2.5
    os.kill(process.pid, signal.SIGCONT)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(f"end {EXIT_REQUEUE} node far is cut off")


def test_agent_fences_when_the_coordinator_does_not_answer(
    stack: ExitStack, tmp_path: Path
) -> None:
    """A network that swallows everything: the socket stays open, only answers are missing."""
    mute = ServerLimits(lease_every_s=1e9, tick_s=0.1)
    server = stack.enter_context(coordinator(TOKEN, SmallRules(), limits=mute))
    owner = Owner()
    opened = agent(TOKEN, tmp_path / "a.sock", owner, changed=limits(lease_s=1.0))
    control = stack.enter_context(opened)
    worker = Worker(tmp_path / "a.sock", TOKEN, 0)
    stack.callback(worker.end)
    assert worker.said() == {"started": worker.pid}
    control.join(*server.address, node_hello())
    _, (code, cause) = owner.wait("end")
    assert code == EXIT_REQUEUE
    assert "has not answered for" in cause
    assert worker.said() == {"lost": True}
    late = Worker(tmp_path / "a.sock", TOKEN, 1)
    assert late.said() == {}
    assert "RefusedError" in late.end()


def test_answered_agent_keeps_its_lease(stack: ExitStack, tmp_path: Path) -> None:
    prompt = ServerLimits(lease_every_s=0.2, tick_s=0.1)
    server = stack.enter_context(coordinator(TOKEN, SmallRules(), limits=prompt))
    owner = Owner()
    control = agent(TOKEN, tmp_path / "a.sock", owner, changed=limits(lease_s=1.0))
    stack.enter_context(control).join(*server.address, node_hello())
    owner.none("end", 2.5)


def test_agent_fences_when_the_coordinator_is_gone(stack: ExitStack, tmp_path: Path) -> None:
    server = CoordinatorServer(
        token=TOKEN, host="127.0.0.1", membership=SmallRules(), planner=no_plan
    )
    server.start()
    owner = Owner()
    control = agent(TOKEN, tmp_path / "a.sock", owner, changed=limits(lease_s=1.0))
    stack.enter_context(control).join(*server.address, node_hello())
    server.close()
    _, (code, cause) = owner.wait("end")
    assert code == EXIT_REQUEUE
    assert "cut off" in cause


def no_plan(needed: NeedPlan) -> Future[Answer]:
    raise RuntimeError("no pool")


def test_lost_node_is_told_that_the_job_goes_on_without_it(
    stack: ExitStack, tmp_path: Path
) -> None:
    rules = SmallRules()
    server = stack.enter_context(coordinator(TOKEN, rules))
    owners = [Owner(), Owner()]
    with agent(TOKEN, tmp_path / "a.sock", owners[0]) as control:
        control.join(*server.address, node_hello())
        rules.heard(say.NodeBeat)
    rules.wait("lost")
    control = stack.enter_context(agent(TOKEN, tmp_path / "a.sock", owners[1]))
    control.join(*server.address, node_hello())
    _, (code, cause) = owners[1].wait("end")
    assert code == EXIT_REQUEUE
    assert cause == "the job goes on without node a, which was lost"


def test_lost_node_may_come_anew_and_gets_ranks(stack: ExitStack, tmp_path: Path) -> None:
    rules = SmallRules()
    server = stack.enter_context(coordinator(TOKEN, rules))
    with agent(TOKEN, tmp_path / "a.sock", Owner()) as control:
        control.join(*server.address, node_hello())
        rules.heard(say.NodeBeat)
    rules.wait("lost")
    owner = Owner()
    control = stack.enter_context(agent(TOKEN, tmp_path / "a.sock", owner))
    control.join(*server.address, node_hello(ranks=()))
    assert owner.wait("assigned")[1] == ((7,),)
    worker = Worker(tmp_path / "a.sock", TOKEN, 7)
    stack.callback(worker.end)
    rules.heard(say.Hello, rank=7)


def test_two_nodes_of_one_name_are_refused(stack: ExitStack, tmp_path: Path) -> None:
    server = stack.enter_context(coordinator(TOKEN, SmallRules()))
    owners = [Owner(), Owner()]
    for number, owner in enumerate(owners):
        control = agent(TOKEN, tmp_path / f"{number}.sock", owner)
        stack.enter_context(control).join(*server.address, node_hello())
    assert "connected already" in owners[1].wait("end")[1][1]
    owners[0].none("end", 0.3)


def test_actions_reach_the_owner(stack: ExitStack, tmp_path: Path) -> None:
    rules, owner = SmallRules(), Owner()
    ended: list[tuple[int, str]] = []
    server = stack.enter_context(
        coordinator(TOKEN, rules, on_end=lambda code, cause: ended.append((code, cause)))
    )
    rules.answers[say.Exited] = lambda _: [
        ToNode("a", say.Replace(rank=1, incarnation=2)),
        ToNode("a", say.Kill(rank=0, cause="is not wanted")),
        ToNode("nobody", say.Restart(cause="")),
        ToNode("a", say.Restart(cause="rank 1 was killed")),
        NeedPlan("epoch 1", (), "", ""),
        ToNode("a", say.EndNode(exit_code=3, cause="enough")),
        End(3, "enough"),
    ]
    control = stack.enter_context(agent(TOKEN, tmp_path / "a.sock", owner))
    control.join(*server.address, node_hello())
    control.exited(1, 0, "was killed", -9)
    assert owner.wait("replace")[1] == (1, 2)
    assert owner.wait("kill")[1] == (0, "is not wanted")
    assert owner.wait("restart")[1] == ("rank 1 was killed",)
    assert owner.wait("end")[1] == (3, "enough")
    assert rules.wait("planned")[1] == ("epoch 1", "plan of epoch 1", "", 2)
    assert ended == [(3, "enough")]


@pytest.mark.parametrize("planner", [no_plan, lambda _: Future()], ids=["raises", "never ends"])
def test_planner_that_fails_is_an_answer(stack: ExitStack, tmp_path: Path, planner: object) -> None:
    rules = SmallRules()
    short = ServerLimits(plan_s=0.3, tick_s=0.1)
    server = stack.enter_context(coordinator(TOKEN, rules, planner=planner, limits=short))
    rules.answers[say.Exited] = lambda _: [NeedPlan("epoch 1", (), "", "")]
    control = stack.enter_context(agent(TOKEN, tmp_path / "a.sock", Owner()))
    control.join(*server.address, node_hello())
    control.exited(1, 0, "was killed", -9)
    _, (request, plan, why, _) = rules.wait("planned")
    assert (request, plan) == ("epoch 1", None)
    assert "the planner failed" in why


def test_error_in_the_rules_reaches_everybody(stack: ExitStack, tmp_path: Path) -> None:
    rules, owner = SmallRules(), Owner()
    ended: list[tuple[int, str]] = []
    server = CoordinatorServer(
        token=TOKEN,
        host="127.0.0.1",
        membership=rules,
        planner=no_plan,
        on_end=lambda code, cause: ended.append((code, cause)),
    )
    server.start()
    rules.answers[say.Exited] = lambda _: [][0]
    control = stack.enter_context(agent(TOKEN, tmp_path / "a.sock", owner))
    control.join(*server.address, node_hello())
    control.exited(1, 0, "was killed", -9)
    code, cause = owner.wait("end")[1]
    assert (code, "the coordinator failed: IndexError" in cause) == (1, True)
    with pytest.raises(IndexError):
        server.close()
    assert ended == [(code, cause)]


def test_people_ask(stack: ExitStack, tmp_path: Path) -> None:
    rules = SmallRules()
    server = stack.enter_context(coordinator(TOKEN, rules))
    control = stack.enter_context(agent(TOKEN, tmp_path / "a.sock", Owner()))
    control.join(*server.address, node_hello())
    rules.heard(say.NodeBeat)
    write_token(tmp_path / "token", TOKEN)
    host, port = server.address
    write_address(tmp_path, Address(address=host, port=port, token_file=str(tmp_path / "token")))
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    where = read_address(tmp_path)
    status = json.loads(ask(where, "status").text)
    assert (status["phase"], status["alive"], status["dropped"]) == ("running", {"a": []}, {})
    drained = ask(where, "drain", "a")
    assert (drained.ok, rules.wait("drain")[1]) == (True, ("a",))
    assert ask(where, "join", "a").ok
    assert ask(where, "drain", "b").text == "there is no node 'b'; nodes: a"
    assert not ask(where, "reboot").ok


def test_people_are_not_kept_waiting(tmp_path: Path) -> None:
    write_token(tmp_path / "token", TOKEN)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        host, port = silent.getsockname()
        where = parse_address(f"{host}:{port}", str(tmp_path / "token"))
        started_s = time.monotonic()
        with pytest.raises(ResiHPError, match="no answer from"):
            ask(where, "status", timeout_s=0.5)
        assert time.monotonic() - started_s < 2.0
    with pytest.raises(ResiHPError, match="control link to"):
        ask(where, "status")


def test_people_are_told_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a job running"):
        read_address(tmp_path)
    (tmp_path / "coordinator.json").write_text('{"address": 1}')
    with pytest.raises(UserError, match="not what a coordinator writes"):
        read_address(tmp_path)
    for text in ("nothing", "host:", ":1", "host:70000"):
        with pytest.raises(UserError, match="is not HOST:PORT"):
            parse_address(text, "token")
    assert parse_address("[::1]:29", "token").address == "::1"
    with pytest.raises(UserError, match="only the job's owner has"):
        ask(parse_address("127.0.0.1:1", str(tmp_path / "none")), "status")


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::"])
def test_coordinator_listens_on_one_interface(host: str) -> None:
    with pytest.raises(UserError, match="one interface"):
        CoordinatorServer(token=TOKEN, host=host, membership=SmallRules(), planner=no_plan)
