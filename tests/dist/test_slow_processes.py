"""Brakes on real processes: a process keeps about the part of its speed that it is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from slow_jobs import groups_of, needs_quota

from resihp_ext.brake.cpu_group import remove_groups

pytestmark = pytest.mark.dist

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
# What 10 ms of work take in all, once a fault has begun, and once it is over; idle in between.
WORKER = """
import os, sys, time
from pathlib import Path
from megatron.resilience.faults.inject import Injector
from megatron.resilience.faults.slowing import Brakes
from resihp_ext.faults.fault import By, Fault, Kind
by, factor, launcher = By(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
fault = Fault(at_step=30, until_step=60, rank=3, kind=Kind.SLOW, factor=factor, by=by)
brakes = Brakes(launcher_pid=launcher, rank=3)
injector = Injector([fault], rank=3, node="a", folder=Path(sys.argv[1]), brakes=brakes)
for step in range(1, 90):
    injector.at("forward", step)
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    while time.process_time() - cpu_s < 0.01:
        pass
    print(step, time.perf_counter() - begun_s, flush=True)
    if step == 59 and "stay" in sys.argv:
        time.sleep(600)
    time.sleep(0.005)
injector.close()
"""


@pytest.fixture(autouse=True)
def no_group_stays() -> Iterator[None]:
    yield
    remove_groups(os.getpid())
    assert groups_of(os.getpid()) == []


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(folder), *words[:2], str(os.getpid()), *words[2:]]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(
    ("by", "factor"),
    [
        pytest.param("quota", 0.5, marks=needs_quota),
        pytest.param("quota", 0.2, marks=needs_quota),
        ("load", 0.5),
        ("load", 0.25),
    ],
)
def test_it_keeps_a_part_of_its_speed_and_gets_all_of_it_back(
    tmp_path: Path, by: str, factor: float
) -> None:
    worker = start(tmp_path, by, str(factor))
    out, said = worker.communicate(timeout=LIMIT_S)
    assert worker.returncode == 0, said
    took_s = {int(step): float(s) for step, s in map(str.split, out.splitlines())}
    before_s, slow_s, after_s = (
        median(took_s[step] for step in range(first + 2, first + 29)) for first in (1, 30, 60)
    )
    # The machine may have other work: it only adds.
    assert slow_s > 0.7 * 0.01 / factor, said
    assert max(before_s, after_s) < 0.7 * slow_s, (before_s, slow_s, after_s)
    lines = [line for line in said.splitlines() if line.startswith("resihp: fault")]
    assert lines == [
        f"resihp: fault: rank 3 keeps {factor:g} of its speed by {by} from step 30 on",
        "resihp: fault: rank 3 keeps all of its speed from step 60 on",
    ]
    assert groups_of(os.getpid()) == []
    assert (tmp_path / "faults" / "000.done").exists()


@needs_quota
def test_what_a_killed_process_leaves_is_removed_by_the_launcher(tmp_path: Path) -> None:
    worker = start(tmp_path, "quota", "0.5", "stay")
    assert worker.stdout is not None
    while not worker.stdout.readline().startswith("59 "):
        assert worker.poll() is None
    (job, mine) = groups_of(os.getpid())
    assert (mine.parent, mine.name) == (job, f"3.{worker.pid}")
    worker.kill()
    remove_groups(os.getpid())
    assert groups_of(os.getpid()) == []
    worker.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_load_ends_with_its_process(tmp_path: Path, signum: signal.Signals) -> None:
    worker = start(tmp_path, "load", "0.25", "stay")
    assert worker.stdout is not None
    while not worker.stdout.readline().startswith("59 "):
        assert worker.poll() is None
    burners = children(worker.pid)
    assert len(burners) == 3
    worker.send_signal(signum)
    worker.communicate(timeout=LIMIT_S)
    deadline_s = time.monotonic() + LIMIT_S
    while any(Path(f"/proc/{pid}").exists() for pid in burners):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
