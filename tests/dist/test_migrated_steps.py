"""Micro-batches leave a slow emulated device within a step, and training stays what it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.parity import MODEL
from megatron.resilience.testing.trial import Trial, max_rel_diff, run_trial
from resihp_ext.events import Event

pytestmark = pytest.mark.dist

STEPS, SLOW_FROM, MICRO_BATCHES, SLOW_RANK = 8, 4, 16, 3
SCENE = "{model: llama2-7b, hardware: a100, time_scale: 0.15}"
FAULTS = f"[{{at_step: {SLOW_FROM}, kind: slow, rank: {SLOW_RANK}, factor: 0.4}}]"


class Jobs:
    """The same job of DP 2 x PP 2, with other flags."""

    def __init__(self, folder: Path) -> None:
        scene, faults, layout = (folder / f"{name}.yaml" for name in ("scene", "faults", "layout"))
        scene.write_text(SCENE)
        faults.write_text(FAULTS)
        layout.write_text("- {step: 0, uniform: {tp: 1, pp: 2, dp: 2}}")
        data = write_corpus(folder / "data", documents=150)
        self.plain = [*MODEL, "--data-path", str(data), "--train-iters", str(STEPS)]
        self.plain += ["--device", "cpu", "--global-batch-size", str(MICRO_BATCHES)]
        self.words = [*self.plain, "--resilience-plan-schedule", str(layout)]
        self.words += ["--resilience-emulate", str(scene), "--resilience-faults", str(faults)]

    def run(self, *extra: str) -> Trial:
        return run_trial([*self.words, *extra], world_size=4)


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


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_step_with_a_slow_device_is_shorter_and_trains_the_same(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path)
    without, moving = jobs.run(), jobs.run("--resilience-migrate-delta-micro-batches", "1")
    one = run_trial(jobs.plain)
    moved = of(moving, Event.MIGRATED)
    assert {event["step"] for event in moved} >= set(range(SLOW_FROM, STEPS + 1))
    assert not of(without, Event.MIGRATED)
    slow = [event for event in moved if event["step"] >= SLOW_FROM]
    assert {event["target"] for event in slow} == {"0.1"}
    for trial in (without, moving):
        assert max_rel_diff(trial.losses, one.losses) <= 1e-5
        assert max_rel_diff(trial.grad_norms, one.grad_norms) <= 5e-5
        assert trial.disagreements == 0
    assert all(sum(step.values()) == MICRO_BATCHES for step in counts(moving))
    assert counts(moving)[-1][0] > MICRO_BATCHES // 2
    assert slow_step_s(moving) < 0.9 * slow_step_s(without)
