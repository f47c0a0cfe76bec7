"""Micro-batches leave a slow emulated device within a step, and training stays what it was."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from jobs import ENTRY

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.parity import MODEL
from megatron.resilience.testing.trial import Trial, max_rel_diff, run_trial
from resihp_ext.events import Event, read_events

pytestmark = pytest.mark.dist

STEPS, SLOW_FROM, MICRO_BATCHES, SLOW_RANK = 8, 4, 16, 3
SCENE = "{model: llama2-7b, hardware: a100, time_scale: 0.15}"
VICTIM, KILLED_IN = 2, 6
"""The rank that micro-batches move to, and the step in which it dies."""
SLOW = f"{{at_step: {SLOW_FROM}, kind: slow, rank: {SLOW_RANK}, factor: 0.4}}"
KILL = f"{{at_step: {KILLED_IN}, phase: backward, micro_batch: 8, rank: {VICTIM}, kind: kill}}"


class Jobs:
    """The same job of DP 2 x PP 2, with other flags."""

    def __init__(self, folder: Path) -> None:
        scene, faults, layout = (folder / f"{name}.yaml" for name in ("scene", "faults", "layout"))
        scene.write_text(SCENE)
        faults.write_text(f"[{SLOW}]")
        layout.write_text("- {step: 0, uniform: {tp: 1, pp: 2, dp: 2}}")
        data = write_corpus(folder / "data", documents=150)
        self.plain = [*MODEL, "--data-path", str(data), "--train-iters", str(STEPS)]
        self.plain += ["--device", "cpu", "--global-batch-size", str(MICRO_BATCHES)]
        self.plain += ["--packed-sequences"]
        self.words = [*self.plain, "--resilience-plan-schedule", str(layout)]
        self.words += ["--resilience-emulate", str(scene), "--resilience-faults", str(faults)]

    def run(self, *extra: str) -> Trial:
        return run_trial([*self.words, *extra], world_size=4)


def steps_as_in(plain: list[str], events: list[dict[str, Any]]) -> None:
    """Every step once, with the losses and the very micro-batches of one process."""
    one = run_trial(plain)
    steps = [event for event in events if event["event"] == Event.ITERATION]
    assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
    assert max_rel_diff([event["losses"]["lm loss"] for event in steps], one.losses) <= 1e-5
    assert max_rel_diff([event["grad_norm"] for event in steps], one.grad_norms) <= 5e-5
    assert samples(events) == samples(one.events)


def samples(events: list[dict[str, Any]]) -> list[Counter[tuple[int, ...]]]:
    """The micro-batches of each step, by their segments; of a repeated one those done last."""
    found = []
    for step in range(1, STEPS + 1):
        records = {
            (event["plan"], event["replica"]): event["micro_batches"]
            for event in events
            if event["event"] == Event.MICRO_BATCHES and event["step"] == step
        }
        latest = max(plan for plan, _ in records)
        found.append(
            Counter(
                tuple(one["segments"])
                for (plan, _), micro_batches in records.items()
                for one in micro_batches
                if plan == latest
            )
        )
    return found


def of(trial: Trial, kind: Event) -> list[dict[str, Any]]:
    return [event for event in trial.events if event["event"] == kind]


def slow_step_s(trial: Trial) -> float:
    ended_s = [event["time_s"] for event in of(trial, Event.ITERATION)]
    return median([after - before for before, after in pairwise(ended_s)][SLOW_FROM - 1 :])


def counts(trial: Trial) -> Sequence[Counter[int]]:
    """How many micro-batches had their loss in each replica, step after step."""
    found = [Counter[int]() for _ in range(STEPS)]
    for event in of(trial, Event.MICRO_BATCHES):
        found[event["step"] - 1][event["replica"]] += len(event["micro_batches"])
    return found


@pytest.mark.timeout(240)
def test_a_step_with_a_slow_device_is_shorter_and_trains_the_same(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    without, moving = jobs.run(), jobs.run("--resilience-migrate-delta", "1")
    moved = of(moving, Event.MIGRATED)
    assert {event["step"] for event in moved} >= set(range(SLOW_FROM, STEPS + 1))
    assert not of(without, Event.MIGRATED)
    slow = [event for event in moved if event["step"] >= SLOW_FROM]
    assert {event["target"] for event in slow} == {"0.1"}
    steps_as_in(jobs.plain, moving.events)
    assert moving.disagreements == 0
    assert all(sum(step.values()) == MICRO_BATCHES for step in counts(moving))
    assert counts(moving)[-1][0] > MICRO_BATCHES // 2
    assert slow_step_s(moving) < 0.9 * slow_step_s(without)


@pytest.mark.timeout(300)
def test_the_rank_that_work_moves_to_dies_and_every_sample_counts_once(tmp_path: Path) -> None:
    jobs, folder, faults = Jobs(tmp_path), tmp_path / "resilience", tmp_path / "both.yaml"
    faults.write_text(f"[{SLOW}, {KILL}]")
    words = [*jobs.plain, "--pipeline-model-parallel-size", "2", "--resilience"]
    words += ["--resilience-dir", str(folder), "--resilience-faults", str(faults)]
    words += ["--resilience-emulate", str(tmp_path / "scene.yaml")]
    words += ["--resilience-migrate-delta", "1"]
    launcher = [sys.executable, "-m", "resihp_ext.launcher.run", "--nproc-per-node", "4"]
    environment = {name: value for name, value in os.environ.items() if name != "LOGLEVEL"}
    done = subprocess.run(
        [*launcher, str(ENTRY), *words],
        cwd=tmp_path,
        env=environment,
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"rank {VICTIM} " in done.stderr
    assert "was killed by signal 9" in done.stderr
    events = read_events(folder / "events.jsonl")
    moved = {event["step"] for event in events if event["event"] == Event.MIGRATED}
    assert moved & {SLOW_FROM, SLOW_FROM + 1}, "before the death"
    steps_as_in(jobs.plain, events)
