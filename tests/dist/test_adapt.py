"""A job changes its plan when a device becomes slow, and again when it is as fast as before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.resilience.testing.chaos.ledger import compare, differences
from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.slow_job import Job, run
from resihp_ext.faults.fault import Fault, Kind
from resihp_ext.plan.plan import Plan

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).resolve().parents[2]
STEPS, SLOW_FROM, HEALTHY_FROM = 60, 21, 37
SLOW = Fault(at_step=SLOW_FROM, until_step=HEALTHY_FROM, rank=2, kind=Kind.SLOW, factor=0.5)
SCENE = {"model": "llama2-7b", "hardware": "a100", "time_scale": 0.2, "noise": 0.01}
LAYOUT = ("--pipeline-model-parallel-size", "2", "--global-batch-size", "8")
TERMS = (
    *("--resilience-act-transition-s", "0.2", "--resilience-act-after-steps", "1"),
    *("--resilience-act-cool-down-steps", "4"),
)


def test_a_slow_device_changes_the_plan_and_its_recovery_changes_it_back(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "data", documents=60)
    peace = run(
        Job(ranks=4, steps=STEPS, detect="off", flags=LAYOUT),
        tree=ROOT,
        data=data,
        folder=tmp_path / "peace",
    )
    found = run(
        Job(ranks=4, steps=STEPS, detect="act", slow=[SLOW], scene=SCENE, flags=(*LAYOUT, *TERMS)),
        tree=ROOT,
        data=data,
        folder=tmp_path / "job",
    )
    for one in (peace, found):
        assert one.ended.exit_codes == (0,), one.log[-3000:]
        assert not one.ended.leftovers
    assert compare(found.ledger, peace.ledger, STEPS) == []
    assert differences(found.ledger.losses, peace.ledger.losses) < 1e-5
    assert found.first_processes
    lines = [line for line in found.log.splitlines() if line.startswith("resihp: ")]
    assert any("rank 2 at 0." in one["reason"] for one in found.receipts), lines
    assert len(found.receipts) == 2, lines
    first, second = found.receipts
    assert SLOW_FROM + 2 < first["step"] < HEALTHY_FROM
    assert first["reason"].startswith("rank 2 at 0."), first["reason"]
    assert second["step"] > HEALTHY_FROM + 2
    assert second["reason"].startswith("rank 2 at full speed again: another plan saves ")
    folder = tmp_path / "job" / "resilience" / "plans"
    plans = [
        Plan.from_json((folder / f"{r['to_version']:03d}.json").read_text())
        for r in (first, second)
    ]
    p = [{one.rank: one.p for one in plan.devices}[2] for plan in plans]
    assert p == [pytest.approx(0.5, abs=0.03), 1.0]
    # Nobody else is blamed, neither before a change nor after it.
    named = [line for line in lines if " of its speed" in line or "full speed again since" in line]
    assert [line.split(" (node")[0] for line in named] == ["resihp: rank 2"] * 2, lines
    said = [line for line in lines if line.startswith("resihp: from step ")]
    assert [line.split(" (")[0] for line in said] == [
        f"resihp: from step {r['step'] + 1} plan {r['to_version']} instead of {r['from_version']}"
        for r in (first, second)
    ]
    # It was worth it.
    before = [found.step_s(step) for step in range(SLOW_FROM + 1, first["step"])]
    between = [found.step_s(step) for step in range(first["step"] + 3, HEALTHY_FROM - 1)]
    assert sum(between) / len(between) < 0.9 * sum(before) / len(before)
    acts = found.weighed("act")
    assert [json.dumps(one["why"])[1:7] for one in acts] == ["rank 2", "rank 2"]
