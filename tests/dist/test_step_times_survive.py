"""Times of steps in a job that loses a rank in the middle of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from jobs import ENTRY, command

from megatron.resilience.testing.corpus import write_corpus
from resihp_ext.detector.timed import RankStep
from resihp_ext.events import Event, read_events
from resihp_ext.plan.action import Kind

pytestmark = pytest.mark.dist

STEPS, FAULT_STEP, MICRO_BATCHES = 6, 3, 8
FAULT = f"- {{at_step: {FAULT_STEP}, phase: backward, micro_batch: 5, rank: 1, kind: kill}}"


def steps_of_survivor(folder: Path) -> list[RankStep]:
    """Two replicas of one rank each; the second dies, and comes back when it can."""
    data = write_corpus(folder / "data", documents=150)
    faults = folder / "faults.yaml"
    faults.write_text(FAULT)
    argv = command(data, "--packed-sequences", "--device", "cpu", "--resilience", steps=STEPS)
    argv += ["--resilience-dir", str(folder), "--resilience-faults", str(faults)]
    launcher = [sys.executable, "-m", "resihp_ext.launcher.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(ENTRY), *argv, "--resilience-timings-steps", "1"],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=150,
        env={k: v for k, v in os.environ.items() if k != "LOGLEVEL"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    events = read_events(folder / "events.jsonl")
    times = [event["times"] for event in events if event["event"] == Event.STEP_TIMES]
    return [one for one in msgspec.convert(times, list[RankStep]) if one.rank == 0]


@pytest.mark.timeout(200)
def test_the_attempt_that_was_completed_counts(tmp_path: Path) -> None:
    steps = steps_of_survivor(tmp_path)
    assert [step.step for step in steps] == list(range(1, STEPS + 1))
    before, broken = steps[FAULT_STEP - 2], steps[FAULT_STEP - 1]
    assert broken.version > before.version
    assert len(before.micro_batches) == MICRO_BATCHES / 2
    assert len(broken.micro_batches) == MICRO_BATCHES, "alone"
    for step in (before, broken):
        found = sorted((str(one.kind), one.micro_batch) for one in step.actions)
        numbers = [one.number for one in step.micro_batches]
        each = [(str(kind), number) for kind in (Kind.FORWARD, Kind.BACKWARD) for number in numbers]
        assert found == sorted([*each, ("SYNC", -1), ("STEP", -1)])
    lost_s = broken.actions[0].start_s
    assert lost_s > before.actions[0].start_s, "what was begun in vain is in the total alone"
    assert broken.total_s > lost_s + sum(one.own_s for one in broken.actions)
    assert steps[FAULT_STEP].begun_s == pytest.approx(broken.begun_s + broken.total_s, abs=0.01)
