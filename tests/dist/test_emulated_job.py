"""A job on emulated devices takes as long as the cost model says, also with a slow device."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.parity import MODEL
from megatron.resilience.testing.trial import run_trial
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.emulation.prices import Prices
from resihp_ext.emulation.scene import scene_from_yaml
from resihp_ext.events import Event
from resihp_ext.plan.action import Action
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import Instance, uniform_plan
from resihp_ext.plan.schedule import one_forward_one_backward

pytestmark = pytest.mark.dist

STEPS, SLOW_FROM, MICRO_BATCHES, SLOW_RANK = 14, 8, 4, 2
SCENE = "{model: llama2-7b, hardware: a100, time_scale: 0.3}"
FAULTS = f"[{{at_step: {SLOW_FROM}, kind: slow, rank: {SLOW_RANK}, factor: 0.5}}]"


def predicted_s(slow: bool) -> float:
    plan = uniform_plan(num_layers=4, tp=1, pp=2, dp=2, micro_batches=MICRO_BATCHES)
    prices = Prices(scene_from_yaml(SCENE, "scene"), plan, 96, MemoryPolicy())

    def cost(instance: Instance, action: Action) -> float:
        hit = slow and SLOW_RANK in plan.stage(instance).ranks and action.peer is None
        return prices.seconds(instance, action) * (2.0 if hit else 1.0)

    return dry_run(one_forward_one_backward(plan), cost).makespan


def test_steps_take_what_the_cost_model_says(tmp_path: Path) -> None:
    scene, faults = tmp_path / "scene.yaml", tmp_path / "faults.yaml"
    scene.write_text(SCENE)
    faults.write_text(FAULTS)
    data = write_corpus(tmp_path / "data", documents=60)
    layout = tmp_path / "layout.yaml"
    layout.write_text("- {step: 0, uniform: {tp: 1, pp: 2, dp: 2}}")
    words = [*MODEL, "--data-path", str(data), "--train-iters", str(STEPS), "--device", "cpu"]
    words += ["--global-batch-size", str(MICRO_BATCHES), "--resilience-plan-schedule", str(layout)]
    words += ["--resilience-emulate", str(scene), "--resilience-faults", str(faults)]
    trial = run_trial(words, world_size=4)
    done_s = [event["time_s"] for event in trial.events if event["event"] == Event.ITERATION]
    times = [after - before for before, after in pairwise(done_s)]
    healthy_s, slow_s = median(times[2 : SLOW_FROM - 2]), median(times[SLOW_FROM - 1 :])
    ends = [event["emulation"] for event in trial.events if event["event"] == Event.JOB_END]
    # The first step of every rank does what is done once.
    assert sum(one["overruns"] for one in ends) <= 0.05 * sum(one["actions"] for one in ends)
    assert healthy_s == pytest.approx(predicted_s(False), rel=0.05)
    assert slow_s == pytest.approx(predicted_s(True), rel=0.05)
