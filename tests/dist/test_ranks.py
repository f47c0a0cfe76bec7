"""The harness itself: results, errors, kills, time limits, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from pickle import PicklingError
from typing import Any

import psutil
import pytest
import torch
from torch import distributed

from megatron.resilience.testing.trial import PRELOAD
from resihp_ext.environment import RankEnvironment
from resihp_ext.testing.ranks import RankError, Ranks, preload, run_ranks, start_ranks

pytestmark = pytest.mark.dist

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
FOREVER_S = 600.0


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    # Shared with the other tests: the first use decides what the fork server imports.
    preload(PRELOAD)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Ranks, what they have started, their descriptors and folders are gone after each test."""
    run_ranks(1, own_pid)  # the fork server itself stays, with its helper
    before = descendants()
    folders, descriptors = rank_folders(), len(os.listdir("/proc/self/fd"))
    yield
    deadline_s = time.monotonic() + 5
    while left := descendants() - before:
        assert time.monotonic() < deadline_s, left
        time.sleep(0.01)
    gc.collect()  # a caught error holds the frame that holds the set
    assert rank_folders() == folders
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def descendants() -> set[int]:
    """Processes below this one that are not dead; those of a rank are children of the server."""
    return {
        process.pid
        for process in psutil.Process().children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE
    }


def rank_folders() -> set[Path]:
    return set(Path(os.environ.get("TMPDIR", "/tmp")).glob("ranks-*"))


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def wait_until_gone(pid: int) -> None:
    deadline_s = time.monotonic() + 5
    while alive(pid):
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        time.sleep(0.01)


def rank() -> int:
    return RankEnvironment.from_environ(os.environ).rank


def own_pid() -> int:
    return os.getpid()


def own_variables() -> dict[str, str]:
    return {name: os.environ[name] for name in (*VARIABLES, "OMP_NUM_THREADS")}


def slow_first(base: int) -> int:
    time.sleep(0.3 if rank() == 0 else 0.0)
    return base + rank()


def all_reduce() -> float:
    distributed.init_process_group("gloo")
    value = torch.tensor([float(rank() + 1)])
    distributed.all_reduce(value)
    distributed.destroy_process_group()
    return value.item()


def fail_on(culprit: int) -> int:
    os.write(1, f"rank {rank()} was here\n".encode())
    if rank() == culprit:
        deeper_down()
    return rank()


def deeper_down() -> None:
    raise ArithmeticError("the cause")


def exit_with(code: int) -> None:
    os._exit(code)


def leave(code: int) -> None:
    sys.exit(code)


def hang_on(culprit: int) -> int:
    os.write(2, b"before the hang\n")
    if rank() == culprit:
        time.sleep(FOREVER_S)
    return rank()


def wait_for_the_dead(folder: str) -> str:
    """All ranks meet; then everybody waits for rank 1, which is killed."""
    distributed.init_process_group("gloo")
    distributed.barrier()
    Path(folder, str(rank())).touch()
    if rank() == 1:
        time.sleep(FOREVER_S)
    try:
        distributed.barrier()
    except RuntimeError:
        return "saw it die"
    return "saw nothing"


def start_helper(folder: str) -> int:
    """A helper process that would outlive its rank, deaf to polite signals."""
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    helper = subprocess.Popen([sys.executable, "-c", code])
    Path(folder, "pid").write_text(str(helper.pid))
    return helper.pid


def unpicklable() -> Any:
    return lambda: None


def enormous() -> bytes:
    return bytes(20_000_000)


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(4, slow_first, 10, timeout_s=30) == [10, 11, 12, 13]


def test_a_result_larger_than_a_pipe() -> None:
    assert run_ranks(2, enormous, timeout_s=30) == [bytes(20_000_000)] * 2


def test_every_rank_has_a_process_of_its_own() -> None:
    pids = run_ranks(3, own_pid, timeout_s=30)
    assert len({*pids, os.getpid()}) == 4


def test_every_rank_knows_its_place() -> None:
    found = run_ranks(3, own_variables, timeout_s=30, environment={"OMP_NUM_THREADS": "2"})
    for index, variables in enumerate(found):
        assert variables["RANK"] == variables["LOCAL_RANK"] == str(index)
        assert variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] == "3"
        assert variables["OMP_NUM_THREADS"] == "2", "what the caller sets wins"
    assert len({variables["MASTER_PORT"] for variables in found}) == 1
    assert "RANK" not in os.environ
    assert run_ranks(1, own_variables, timeout_s=30)[0]["OMP_NUM_THREADS"] == "1"


def test_ranks_talk_to_each_other() -> None:
    assert run_ranks(4, all_reduce, timeout_s=60) == [10.0] * 4


def test_two_sets_at_once_do_not_meet() -> None:
    with start_ranks(2, all_reduce) as first, start_ranks(3, all_reduce) as second:
        assert second.join(60) == [6.0] * 3
        assert first.join(60) == [3.0] * 2


def test_an_error_comes_with_its_traceback_and_the_log() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(3, fail_on, 1, timeout_s=30)
    text = str(raised.value)
    assert text.startswith("rank 1 raised\nTraceback")
    for part in ("in fail_on", "in deeper_down", "ArithmeticError: the cause"):
        assert part in text
    log = text.partition("--- end of the log of rank 1 ---")[2]
    assert log.strip() == "rank 1 was here"


def test_sys_exit_of_a_rank_is_an_error() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 raised.*SystemExit: 3"):
        run_ranks(1, leave, 3, timeout_s=30)


def test_a_result_that_cannot_travel_is_an_error() -> None:
    with pytest.raises(RankError, match="rank 0"):
        run_ranks(1, unpicklable, timeout_s=30)


def test_a_rank_that_just_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code 9"):
        run_ranks(1, exit_with, 9, timeout_s=30)


def test_a_killed_rank_is_named_and_survivors_give_their_results(tmp_path: Path) -> None:
    with start_ranks(3, wait_for_the_dead, str(tmp_path)) as ranks:
        wait_for_files(tmp_path, {"0", "1", "2"})
        ranks.kill(1)
        assert ranks.join(30, survivors=[2, 0]) == ["saw it die"] * 2
        with pytest.raises(RankError, match=f"rank 1 died with exit code -{signal.SIGKILL:d}"):
            ranks.join(30)


def wait_for_files(folder: Path, names: set[str]) -> None:
    deadline_s = time.monotonic() + 30
    while not names <= set(os.listdir(folder)):
        assert time.monotonic() < deadline_s, os.listdir(folder)
        time.sleep(0.01)


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_time_limit_ends_a_hang(culprit: int) -> None:
    started_s = time.monotonic()
    with start_ranks(2, hang_on, culprit) as ranks:
        with pytest.raises(RankError) as raised:
            ranks.join(1.5)
        pids = [process.pid for process in ranks.processes]
    assert f"ranks [{culprit}] did not finish in 1.5 s" in str(raised.value)
    assert f"log of rank {culprit} ---\nbefore the hang" in str(raised.value)
    assert 1.4 < time.monotonic() - started_s < 8
    for pid in pids:
        wait_until_gone(pid)


def test_a_result_is_kept_for_a_second_join() -> None:
    with start_ranks(2, hang_on, 1) as ranks:
        assert ranks.join(30, survivors=[0]) == [0]
        with pytest.raises(RankError, match=r"ranks \[1\] did not finish"):
            ranks.join(0.1)
        assert ranks.join(0.1, survivors=[0]) == [0]
        assert ranks.log(0) == "before the hang\n"


def test_helpers_of_a_rank_end_with_it(tmp_path: Path) -> None:
    (pid,) = run_ranks(1, start_helper, str(tmp_path), timeout_s=30)
    wait_until_gone(pid)


def test_helpers_of_a_killed_rank_end_with_the_set(tmp_path: Path) -> None:
    with start_ranks(1, start_helper_and_hang, str(tmp_path)) as ranks:
        wait_for_files(tmp_path, {"pid", "ready"})
        pid = int((tmp_path / "pid").read_text())
        ranks.kill(0)
        with pytest.raises(RankError, match="died with exit code -9"):
            ranks.join(30)
        assert alive(pid)
    wait_until_gone(pid)


def start_helper_and_hang(folder: str) -> None:
    start_helper(folder)
    Path(folder, "ready").touch()
    time.sleep(FOREVER_S)


def test_an_error_of_the_test_itself_ends_the_ranks() -> None:
    ranks = start_ranks(2, hang_on, 0)
    pids = [process.pid for process in ranks.processes]
    with pytest.raises(ZeroDivisionError), ranks:
        _ = 1 / 0
    for pid in pids:
        wait_until_gone(pid)


def test_a_target_that_cannot_travel_starts_nothing() -> None:
    with pytest.raises((AttributeError, PicklingError), match="lambda"):
        run_ranks(2, lambda: None, timeout_s=30)


def test_closing_twice_is_closing_once() -> None:
    ranks: Ranks = start_ranks(2, own_pid)
    ranks.join(30)
    ranks.close()
    ranks.close()


def test_starting_a_rank_is_cheap() -> None:
    """What the fork server is for: spawning one would import for seconds."""
    started_s = time.monotonic()
    run_ranks(2, own_pid, timeout_s=30)
    assert time.monotonic() - started_s < 4
