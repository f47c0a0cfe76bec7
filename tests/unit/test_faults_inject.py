"""The injector without anybody dying: when it strikes, that it does so once, what it costs.

Strikes are hangs of a millisecond, and cuts, which only ask.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from megatron.resilience.faults.dropped import drop
from megatron.resilience.faults.inject import Injector
from megatron.resilience.faults.processes import ancestors, stat_of
from megatron.resilience.faults.register import (
    Worker,
    agent_is_alive,
    is_alive,
    read_workers,
    register,
)
from resihp_ext.errors import UserError
from resihp_ext.faults.fault import By, Fault, Kind, Phase

pytestmark = pytest.mark.unit

HANG = Fault(at_step=3, phase=Phase.VOTE, rank=1, kind=Kind.HANG, lasts_s=0.001)
CUT = Fault(at_step=2, node="a", kind=Kind.CUT)


def injector(folder: Path, *faults: Fault, rank: int = 1, node: str = "a") -> Injector:
    return Injector(faults, rank=rank, node=node, folder=folder)


def done(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "faults").glob("*.done"))


def test_it_strikes_at_its_place_and_writes_down_where(tmp_path: Path) -> None:
    faults = injector(tmp_path, CUT, HANG)
    for step, phase in ((2, "vote"), (3, "forward"), (3, "vote")):
        assert "001.done" not in done(tmp_path)
        faults.at(phase, step)
    told = json.loads((tmp_path / "faults" / "001.done").read_text())
    assert (told["rank"], told["step"], told["phase"], told["pid"]) == (1, 3, "vote", os.getpid())


def test_others_are_left_alone(tmp_path: Path) -> None:
    faults = injector(tmp_path, CUT, HANG, rank=2, node="b")
    for step in range(1, 9):
        faults.at(Phase.VOTE, step)
    assert done(tmp_path) == []


def test_a_repeated_step_and_a_replacement_do_not_strike_again(tmp_path: Path) -> None:
    first = injector(tmp_path, CUT, rank=1)
    other = injector(tmp_path, CUT, rank=2)
    first.at("sync", 2)
    request = tmp_path / "faults" / "000.cut"
    assert json.loads(request.read_text())["node"] == "a"
    request.unlink()
    first.at("sync", 2)
    other.at("sync", 2)  # was built before the strike
    injector(tmp_path, CUT, rank=1).at("sync", 2)
    assert not request.exists()
    assert done(tmp_path) == ["000.done"]


def test_a_delayed_strike_lets_the_caller_go_on(tmp_path: Path) -> None:
    request = tmp_path / "faults" / "000.cut"
    fault = Fault(at_step=1, node="a", kind=Kind.CUT, delay_s=0.2)
    injector(tmp_path, fault).at("sync", 1)
    assert done(tmp_path) == ["000.done"]
    assert not request.exists()
    deadline_s = time.monotonic() + 10
    while not request.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_results_of_another_list_are_refused(tmp_path: Path) -> None:
    injector(tmp_path, CUT).at("sync", 2)
    with pytest.raises(UserError, match=r"000\.done: was done by another list .*kind: cut.*remove"):
        injector(tmp_path, HANG)
    (tmp_path / "faults" / "000.done").write_text("")  # died while it wrote
    injector(tmp_path, HANG).at("vote", 3)


def test_a_node_cannot_be_killed_by_whom_no_launcher_started(tmp_path: Path) -> None:
    fault = Fault(at_step=1, node="a", kind=Kind.NODE)
    for agent_pid in (None, os.getpid()):
        with pytest.raises(UserError, match=r"fault 000: kind node: .*resihp-run"):
            Injector([fault], rank=0, node="a", folder=tmp_path, agent_pid=agent_pid)
    Injector([fault], rank=0, node="a", folder=tmp_path, agent_pid=os.getppid())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="give a writable --resilience-dir"):
        injector(tmp_path / "file")
    with pytest.raises(UserError, match="give a writable --resilience-dir"):
        register(tmp_path / "file", rank=0, node="a")


def test_dropped_faults_are_seen_at_the_next_step(tmp_path: Path) -> None:
    faults = injector(tmp_path)
    faults.at("forward", 1)
    names = [drop(tmp_path / "faults", CUT), drop(tmp_path / "faults", HANG)]
    assert names == ["d000-0", "d001-0"]
    faults.at("backward", 1)
    assert done(tmp_path) == []
    faults.at("forward", 4)
    assert done(tmp_path) == ["d000-0.done"]
    faults.at("vote", 4)
    assert done(tmp_path) == ["d000-0.done", "d001-0.done"]
    replacement = injector(tmp_path)
    drop(tmp_path / "faults", CUT)
    replacement.at("vote", 4)
    assert done(tmp_path) == ["d000-0.done", "d001-0.done", "d002-0.done"]


def test_bad_dropped_files_do_not_end_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    faults = injector(tmp_path)
    dropped = tmp_path / "faults" / "dropped"
    dropped.mkdir()
    (dropped / "000.yaml").write_text("- {kind: kill}")
    drop(tmp_path / "faults", Fault(at_step=1, rank=1, kind=Kind.SLOW, factor=0.5, by=By.EMULATED))
    drop(tmp_path / "faults", Fault(at_step=1, node="a", kind=Kind.NODE))
    drop(tmp_path / "faults", CUT)
    faults.at("vote", 5)
    assert [text.partition(":")[0] for text in caplog.messages] == ["ignored"] * 3
    assert done(tmp_path) == ["d003-0.done"]


def test_without_faults_it_costs_next_to_nothing(tmp_path: Path) -> None:
    """Measured 75 ns a phase and 2.6 us a step; the bounds leave room for a busy machine."""
    late = Fault(at_step=10**6, rank=1, kind=Kind.KILL)
    faults = injector(tmp_path, late)
    best_s = step_s = 1.0
    for number in range(1, 6):
        faults.at("forward", number)
        begin_s = time.perf_counter()
        for _ in range(10_000):
            faults.at("forward", number, 3)
        best_s = min(best_s, (time.perf_counter() - begin_s) / 10_000)
        begin_s = time.perf_counter()
        for step in range(1_000):
            faults.at("forward", 10 + step)
        step_s = min(step_s, (time.perf_counter() - begin_s) / 1_000)
    assert best_s < 1e-6
    assert step_s < 50e-6


def test_workers_are_written_down_and_recognised(tmp_path: Path) -> None:
    worker = register(tmp_path, rank=3, node="a", incarnation=2, agent_pid=os.getppid())
    assert read_workers(tmp_path) == {3: worker}
    assert (worker.pid, worker.agent_pid, worker.incarnation) == (os.getpid(), os.getppid(), 2)
    assert is_alive(worker)
    assert agent_is_alive(worker)
    assert [path.name for path in (tmp_path / "workers").iterdir()] == ["3.json"]


@pytest.mark.parametrize("change", [{"start_ticks": 1}, {"boot": "another"}, {"pid": 2**22 + 1}])
def test_another_process_of_the_same_pid_is_not_taken_for_the_worker(
    tmp_path: Path, change: dict[str, int | str]
) -> None:
    worker = register(tmp_path, rank=0, node="a")
    fields = {name: getattr(worker, name) for name in worker.__struct_fields__}
    assert not is_alive(Worker(**{**fields, **change}))


def test_damaged_registers_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no workers/RANK\.json"):
        read_workers(tmp_path)
    register(tmp_path, rank=0, node="a")
    (tmp_path / "workers" / "0.json").write_text('{"rank": "x"}')
    with pytest.raises(UserError, match=r"0\.json: .*expected|Expected"):
        read_workers(tmp_path)


def test_processes_as_the_system_shows_them() -> None:
    own = stat_of(os.getpid())
    assert own is not None
    assert own.state == "R"
    assert own.parent == os.getppid()
    assert ancestors(os.getpid())[0] == os.getppid()
    assert stat_of(2**22 + 1) is None
