"""What the demo is judged by: ``tools/follow_run.py`` and ``tools/compare_runs.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from problems import GB, layout

from megatron.resilience.faults.register import register
from resihp_ext.control.actions import NeedPlan
from resihp_ext.control.planning import Brief, plan_for
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.events import Event, EventLog
from resihp_ext.faults.read import faults_from_yaml
from resihp_ext.plan.plan import Plan

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
STEPS = 10
FALLING = [6.0 - 0.3 * step for step in range(STEPS)]


def ran(tool: str, *words: object) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, ROOT / "tools" / tool, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.stderr == ""
    return ended.returncode, ended.stdout


def run_of(folder: Path, losses: list[float]) -> Path:
    """A job whose rank 0 still has its first process; rank 1 has its second."""
    log = EventLog(folder, rank=0)
    for step, loss in enumerate(losses, start=1):
        log.write(Event.ITERATION, step=step, losses={"lm loss": loss}, grad_norm=1.0)
    log.close()
    register(folder, rank=0, node="n0")
    register(folder, rank=1, node="n0", incarnation=1)
    return folder


def struck(folder: Path, rank: int) -> None:
    (folder / "faults").mkdir()
    (folder / "faults" / "000.done").write_text(json.dumps({"rank": rank}))


def change(folder: Path, step: int) -> None:
    fields: dict[str, Any] = {"receipt": 0, "from_version": 0, "to_version": 1, "moved_bytes": 1}
    log = EventLog(folder, rank=0)
    log.write(Event.TRANSITION, step=step, total_s=0.5, reason="rank 1 died", **fields)
    log.close()


def test_a_run_that_learns_and_keeps_its_processes(tmp_path: Path) -> None:
    folder = run_of(tmp_path, FALLING)
    change(folder, 3)
    struck(folder, 1)
    code, out = ran("follow_run.py", folder, "--steps", STEPS)
    assert code == 0
    assert "rank 1 died: plan 1 after 0.50 s" in out
    assert "lm loss 6.000 -> 3.300 in 10 steps" in out
    assert f"ranks 0 have kept their processes: pids {os.getpid()}\n" in out


def test_a_process_that_nobody_has_hit_and_that_is_another_is_a_failure(tmp_path: Path) -> None:
    code, out = ran("follow_run.py", run_of(tmp_path, FALLING), "--steps", STEPS)
    assert code == 1
    assert "FAILED: no fault has hit ranks 1, and others run as them" in out


@pytest.mark.parametrize(
    ("losses", "text"),
    [(FALLING[:-1], "9 of 10 steps ran"), ([6.0] * STEPS, "the loss does not fall")],
)
def test_a_run_that_stops_early_or_does_not_learn(
    tmp_path: Path, losses: list[float], text: str
) -> None:
    folder = run_of(tmp_path, losses)
    struck(folder, 1)
    code, out = ran("follow_run.py", folder, "--steps", STEPS)
    assert code == 1
    assert f"FAILED: {text}" in out


def compared(tmp_path: Path, losses: list[float], *words: str) -> tuple[int, str]:
    here, there = run_of(tmp_path / "a", losses), run_of(tmp_path / "b", FALLING)
    return ran("compare_runs.py", here, there, *words)


def test_equal_losses(tmp_path: Path) -> None:
    code, out = compared(tmp_path, FALLING)
    assert code == 0
    assert out.splitlines()[-1] == (
        "OK: the loss of 10 steps differs by 0.0e+00 at most (step 1); the bound is 1e-05"
    )
    for step, loss in enumerate(FALLING, start=1):
        assert f"{step:5}  {loss:.5f}  0.0e+00" in out


@pytest.mark.parametrize("factor", [1.00002, float("nan")])
def test_a_loss_that_is_another(tmp_path: Path, factor: float) -> None:
    losses = [*FALLING[:4], FALLING[4] * factor, *FALLING[5:]]
    code, out = compared(tmp_path, losses)
    assert code == 1
    assert "FAILED: the loss of 10 steps differs" in out
    assert "(step 5)" in out


def test_the_bound_may_be_another(tmp_path: Path) -> None:
    losses = [FALLING[0] * 1.00002, *FALLING[1:]]
    assert compared(tmp_path, losses, "--bound", "1e-4")[0] == 0


def test_other_steps_are_not_compared(tmp_path: Path) -> None:
    code, out = compared(tmp_path, FALLING[:-1])
    assert code == 1
    assert "9 steps, 10 in the reference" in out


def test_the_second_blow_of_the_demo_is_a_whole_stage_of_the_layout_after_the_first() -> None:
    script = (ROOT / "scripts" / "demo.sh").read_text()
    text = script.split("<<'YAML'\n")[1].split("YAML")[0]
    first, *others = faults_from_yaml(text, "demo")
    assert {fault.at_step for fault in others} == {others[0].at_step}
    assert others[0].at_step > first.at_step
    nominal = layout(2, 2, 2, layers=4, micro_batches=4)
    policy = MemoryPolicy(param_bytes=4, master_bytes=0, fused=False, sequence_parallel=True)
    brief = Brief(
        shape=MODELS["tiny"], policy=policy, memory_bytes=8 * GB, nominal=nominal, hardware="cpu"
    )
    devices = tuple((one.rank, one.node, one.rank != first.rank) for one in nominal.devices)
    need = NeedPlan(
        request="", devices=devices, problem=brief.to_json(), version=1, plan=nominal.to_json()
    )
    plan = Plan.from_json(plan_for(need).plan)
    stages = [set(stage.ranks) for replica in plan.replicas for stage in replica.stages]
    assert {fault.rank for fault in others} in stages
