"""Faults in real processes: each kind does what it says, once, and nothing else is hit."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron.resilience.faults.inject import Injector
from megatron.resilience.faults.processes import stat_of
from megatron.resilience.faults.register import read_workers, register
from resihp_ext.faults.fault import Fault, Kind, Phase
from resihp_ext.testing.ranks import Ranks, start_ranks

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.SYNC, Phase.VOTE, Phase.OPTIMIZER)
BEAT_S = 0.01


def eventually(what: Callable[[], Any]) -> Any:
    deadline_s = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < deadline_s, "did not come"
        time.sleep(0.01)
    return found


def train(folder: str, faults: tuple[Fault, ...], steps: int) -> dict[str, Any]:
    """Steps that only call the injector; says what a second thread and a signal handler saw."""
    rank, beats, handled = int(os.environ["RANK"]), [time.monotonic()], []
    signal.signal(signal.SIGUSR1, lambda *_: handled.append(time.monotonic()))

    def beat() -> None:
        while True:
            time.sleep(BEAT_S)
            beats.append(time.monotonic())

    threading.Thread(target=beat, daemon=True).start()
    where = Path(folder)
    injector = Injector(faults, rank=rank, node="a", folder=where)
    register(where, rank=rank, node="a")
    begin_s = time.monotonic()
    for step in range(1, steps + 1):
        for phase in PHASES:
            injector.at(phase, step, 0)
        time.sleep(BEAT_S)
    time.sleep(5 * BEAT_S)
    gaps = [after - before for before, after in itertools.pairwise(beats)]
    return {
        "took_s": time.monotonic() - begin_s,
        "gap_s": max(gaps),
        "handled_s": [one - begin_s for one in handled],
    }


def ranks(folder: Path, *faults: Fault, count: int = 2, steps: int = 5) -> Ranks:
    return start_ranks(count, train, str(folder), faults, steps)


def exit_code(running: Ranks, rank: int) -> int:
    running.processes[rank].join(LIMIT_S)
    return running.processes[rank].exitcode


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault(at_step=3, phase=Phase.VOTE, rank=1, kind=Kind.KILL), -signal.SIGKILL),
        (Fault(at_step=3, rank=1, kind=Kind.EXIT, exit_code=7), 7),
        (Fault(at_step=3, rank=1, kind=Kind.EXIT), 1),
    ],
    ids=["kill", "exit 7", "exit"],
)
def test_the_victim_dies_as_told_and_its_replacement_lives(
    out: Path, fault: Fault, code: int
) -> None:
    with ranks(out, fault) as running:
        assert exit_code(running, 1) == code
        assert running.join(LIMIT_S, survivors=[0])
        assert f"fault 000: {fault.kind} of rank 1, by rank 1 in step 3" in running.log(1)
    told = json.loads((out / "faults" / "000.done").read_text())
    assert (told["rank"], told["step"]) == (1, 3)
    with ranks(out, fault) as again:
        assert len(again.join(LIMIT_S)) == 2
        assert "fault" not in again.log(1)


def test_a_stopped_process_lives_and_does_nothing(out: Path) -> None:
    fault = Fault(at_step=2, phase=Phase.BACKWARD, rank=1, kind=Kind.STOP)
    with ranks(out, fault) as running:
        running.join(LIMIT_S, survivors=[0])
        pid = running.processes[1].pid
        eventually(lambda: stat_of(pid).state == "T")
        os.kill(pid, signal.SIGCONT)
        assert running.join(LIMIT_S)


@pytest.mark.parametrize("delay_s", [0.0, 0.1], ids=["at once", "from a timer"])
def test_a_hang_starves_other_threads_and_handlers(out: Path, delay_s: float) -> None:
    fault = Fault(at_step=2, rank=1, kind=Kind.HANG, lasts_s=2.0, delay_s=delay_s)
    with ranks(out, fault, steps=40) as running:
        eventually((out / "faults" / "000.done").exists)
        time.sleep(0.5)
        os.kill(running.processes[1].pid, signal.SIGUSR1)
        other, victim = running.join(LIMIT_S)
    assert victim["gap_s"] >= 1.9
    assert victim["handled_s"][0] >= 1.9
    assert other["gap_s"] < 1.5


def test_a_hang_can_leave_other_threads_alone(out: Path) -> None:
    fault = Fault(at_step=2, rank=1, kind=Kind.HANG, lasts_s=2.0, holds_gil=False)
    with ranks(out, fault) as running:
        victim = running.join(LIMIT_S)[1]
    assert victim["took_s"] >= 2.0
    assert victim["gap_s"] < 1.5


def test_one_of_many_strikes(out: Path) -> None:
    """All ranks of a node reach the phase at about the same time."""
    faults = [Fault(at_step=step, node="a", kind=Kind.CUT) for step in range(1, 6)]
    with ranks(out, *faults, count=4) as running:
        running.join(LIMIT_S)
        said = [running.log(rank).count("resihp: fault") for rank in range(4)]
    assert sum(said) == 5
    assert len(list((out / "faults").glob("*.cut"))) == 5


# -- a whole node --------------------------------------------------------------

AGENT = """
import os, subprocess, sys, time
workers = [subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2], str(rank)],
           env={**os.environ, "AGENT": str(os.getpid())}, start_new_session=True)
           for rank in range(2)]
for one in workers:
    one.wait()
print("the agent saw a death", flush=True)
"""
WORKER = """
import os, subprocess, sys, time
from pathlib import Path
from megatron.resilience.faults.inject import Injector
from megatron.resilience.faults.register import register
from resihp_ext.faults.fault import Fault, Kind
folder, rank, agent = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["AGENT"])
helper = subprocess.Popen(["sleep", "300"], start_new_session=True)
(folder / f"helper{rank}").write_text(str(helper.pid))
register(folder, rank=rank, node="n1", agent_pid=agent)
faults = [Fault(at_step=20, node="n1", kind=Kind.NODE)] if os.environ.get("STRIKE") else []
injector = Injector(faults, rank=rank, node="n1", folder=folder, agent_pid=agent)
while len(list((folder / "workers").glob("*.json"))) < 2:
    time.sleep(0.01)
for step in range(1, 100000):
    injector.at("forward", step)
    time.sleep(0.01)
"""

StartNode = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start_node(out: Path) -> Iterator[StartNode]:
    started = []

    def start(**variables: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", AGENT, WORKER, str(out)]
        environment = {**os.environ, **variables}
        node = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        started.append(node)
        return node

    yield start
    for node in started:
        node.kill()
    for pid in pids(out):
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
    for node in started:  # its output ends when all who share it have
        node.communicate(timeout=LIMIT_S)


def pids(out: Path) -> list[int]:
    helpers = [int(path.read_text()) for path in out.glob("helper*")]
    return helpers + [one.pid for one in read_workers(out).values()]


def gone(pid: int) -> bool:
    found = stat_of(pid)
    return found is None or found.state == "Z"


def assert_all_gone(out: Path, node: subprocess.Popen[str]) -> None:
    said, _ = node.communicate(timeout=LIMIT_S)
    assert node.returncode == -signal.SIGKILL
    assert said == ""
    assert len(pids(out)) == 4
    eventually(lambda: all(map(gone, pids(out))))


def test_a_node_dies_whole(out: Path, start_node: StartNode) -> None:
    assert_all_gone(out, start_node(STRIKE="1"))
    assert (out / "faults" / "000.done").exists()


# -- from outside --------------------------------------------------------------


def tool(out: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "tools" / "inject_fault.py"), str(out), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr


def registered(out: Path, count: int) -> Callable[[], bool]:
    return lambda: len(list((out / "workers").glob("*.json"))) == count


def test_tool_strikes_by_pid(out: Path) -> None:
    with ranks(out, steps=1000) as running:
        eventually(registered(out, 2))
        pid = running.processes[0].pid
        assert tool(out, "--rank", "0", "--kind", "stop") == (
            0,
            f"resihp: rank 0: process {pid} has got SIGSTOP\n",
        )
        eventually(lambda: stat_of(pid).state == "T")
        code, said = tool(out, "--rank", "1", "--kind", "kill")
        assert code == 0, said
        assert exit_code(running, 1) == -signal.SIGKILL
        code, said = tool(out, "--rank", "1", "--kind", "kill")
        assert (code, said.count("\n")) == (2, 1)
        assert said.startswith(f"error: rank 1: no process {running.processes[1].pid} of it runs")


def test_tool_leaves_faults_for_the_workers(out: Path) -> None:
    with ranks(out, steps=1000) as running:
        eventually(registered(out, 2))
        code, said = tool(out, "--rank", "1", "--kind", "exit", "--exit-code", "9")
        assert (code, said) == (0, "resihp: left for the workers of rank 1 as d000-0\n")
        assert exit_code(running, 1) == 9
        words = "--rank 0 --kind kill --at-step 20 --phase vote"
        assert tool(out, *words.split())[0] == 0
        assert exit_code(running, 0) == -signal.SIGKILL
    told = json.loads((out / "faults" / "d001-0.done").read_text())
    assert told["step"] >= 20
    assert told["phase"] == "vote"


def test_tool_makes_a_rank_slow_until_it_says_otherwise(out: Path) -> None:
    with ranks(out, steps=1000) as running:
        eventually(registered(out, 2))
        words = "--rank 1 --kind slow --factor 0.5 --by load"
        code, said = tool(out, *words.split())
        assert (code, said) == (0, "resihp: left for the workers of rank 1 as d000-0\n")
        told = "rank 1 keeps 0.5 of its speed by load from step"
        eventually(lambda: told in running.log(1))
        burner = f"/proc/{running.processes[1].pid}/task/{running.processes[1].pid}/children"
        assert len(Path(burner).read_text().split()) == 1
        assert tool(out, *["--rank", "1", "--kind", "slow", "--factor", "1"])[0] == 0
        eventually(lambda: "rank 1 keeps all of its speed from step" in running.log(1))
        assert Path(burner).read_text() == ""
        assert (
            tool(out, *["--rank", "1", "--kind", "slow", "--factor", "0.5", "--by", "emulated"])[0]
            == 0
        )
        eventually(lambda: "needs emulated devices" in running.log(1))
        assert "speed" not in running.log(0)


def test_tool_ends_a_node(out: Path, start_node: StartNode) -> None:
    node = start_node()
    eventually(registered(out, 2))
    code, said = tool(out, "--node", "n1", "--kind", "node")
    assert (code, said) == (
        0,
        f"resihp: node n1: launcher {node.pid} and all below have got SIGKILL\n",
    )
    assert_all_gone(out, node)
    assert tool(out, "--node", "n1", "--kind", "node")[0] == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--rank 5 --kind kill", "no rank 5; there are ranks [0] on nodes ['a']"),
        ("--node b --kind node", "no node b; there are"),
        ("--node a --kind kill", "kill needs rank, got node"),
        ("--rank 0 --kind slow", "slow needs factor"),
        ("--node a --kind slow --factor 2", "factor: expected a number above 0, 1 at most"),
        ("--link a b --kind slow", "slow needs node or rank, got link"),
        ("--link x b --kind slow_link --delay-ms 3", "no link x to b; there are ranks [0]"),
        ("--rank 0 --kind kill --lasts-s 3", "lasts_s means nothing for kill"),
        ("--rank 0 --kind hang --at-step 0", "at_step: expected a whole number from 1"),
    ],
)
def test_tool_refuses_in_one_line(out: Path, words: str, said: str) -> None:
    register(out, rank=0, node="a")
    code, line = tool(out, *words.split())
    assert (code, line.count("\n")) == (2, 1)
    assert line.startswith("error: ")
    assert said in line


def test_tool_wants_the_folder_of_a_job(out: Path) -> None:
    code, line = tool(out, "--rank", "0", "--kind", "kill")
    assert code == 2
    assert "no workers/RANK.json" in line
