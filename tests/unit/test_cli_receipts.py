"""``resihp receipts``: what it prints of a job's folder, and its refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.resilience.cli.main import main
from resihp_ext.plan.plan import Instance, Plan, Replica, Stage, uniform_plan

pytestmark = pytest.mark.unit

DIGESTS = {"master": "00"}
RECEIPT = {
    "step": 6,
    "from_version": 0,
    "to_version": 2,
    "reason": "rank 3 was killed by signal 9 (SIGKILL)",
    "phases_s": {"abort": 0.02, "weights": 0.00001, "move": 0.4, "repeat": 1.25},
    "total_s": 0.42,
    "moved_bytes": 3 * 2**20,
    "lower_bound_bytes": 3 * 2**20,
    "redone_steps": 1,
    "state_digests": DIGESTS,
}


def before() -> Plan:
    return uniform_plan(
        num_layers=4, tp=1, pp=2, dp=2, micro_batches=4, virtual=1, devices_per_node=8
    )


def after() -> Plan:
    """Rank 3 is dead, rank 1 stands by, and one replica does all the work."""
    plan = before()
    first = Replica(stages=(Stage(ranks=(0, 2), layers=(0, 4)),))
    devices = tuple(replace(one, p=0.0 if one.rank == 3 else 1.0) for one in plan.devices)
    routes = ((Instance(replica=0, stage=0),),) * 4
    return Plan(version=2, num_layers=4, devices=devices, replicas=(first,), routes=routes)


def job(folder: Path, *receipts: dict[str, Any]) -> Path:
    for name in ("plans", "receipts"):
        (folder / name).mkdir()
    for plan in (before(), after()):
        (folder / "plans" / f"{plan.version:03d}.json").write_text(plan.to_json() + "\n")
    for number, receipt in enumerate(receipts):
        (folder / "receipts" / f"{number:03d}.json").write_text(json.dumps(receipt))
    return folder


def said(capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> str:
    assert main(["receipts", str(folder), *flags]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def refused(capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    assert main(["receipts", str(folder)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_plans_and_what_led_from_one_to_the_next(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert said(capsys, job(tmp_path, RECEIPT)).splitlines() == [
        "plan 0",
        "  replica 0   [0] layers 0-1   [2] layers 2-3   2 of 4 micro-batches",
        "  replica 1   [1] layers 0-1   [3] layers 2-3   2 of 4 micro-batches",
        "after step 6: rank 3 was killed by signal 9 (SIGKILL)",
        "    0.42 s (abort 0.02, move 0.40); then the step again 1.25 s",
        "    3.0 MiB moved (the least possible), 1 step done again, state verified",
        "plan 2",
        "  replica 0   [0, 2] layers 0-3 *   4 of 4 micro-batches",
        "  standby     1",
        "  dead        3",
    ]


def test_a_job_without_changes_has_its_first_plan(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = said(capsys, job(tmp_path))
    assert out.splitlines()[0] == "plan 0"
    assert "after step" not in out


def test_json_is_the_receipts_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    other = RECEIPT | {"from_version": 2, "to_version": 3, "reason": "rank 3 joined"}
    assert json.loads(said(capsys, job(tmp_path, RECEIPT, other), "--json")) == [RECEIPT, other]


def test_a_plan_that_was_not_kept_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = job(tmp_path, RECEIPT)
    (folder / "plans" / "002.json").unlink()
    assert said(capsys, folder).splitlines()[-1] == "plan 2 was not kept"


def test_more_moved_than_needed_and_control_characters_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    odd = {"lower_bound_bytes": 2**20, "redone_steps": 0, "reason": "a\x07"}
    out = said(capsys, job(tmp_path, RECEIPT | odd))
    assert "3.0 MiB moved of 1.0, no step done again" in out
    assert "\x07" not in out


def test_a_state_that_its_owners_have_lost_comes_from_somewhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lost = {"source": "checkpoints/iter_0000004", "state_digests": {}, "redone_steps": 3}
    out = said(capsys, job(tmp_path, RECEIPT | lost))
    assert "    state from checkpoints/iter_0000004, 3.0 MiB moved" in out
    assert "state verified" not in out


def test_a_large_layout_is_drawn_with_alike_neighbours_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = job(tmp_path)
    large = uniform_plan(
        num_layers=8, tp=2, pp=4, dp=32, micro_batches=64, virtual=1, devices_per_node=8
    )
    (folder / "plans" / "000.json").write_text(large.to_json())
    lines = said(capsys, folder).splitlines()
    assert len(lines) < 12
    assert any("replicas 0-31" in line for line in lines)


def test_what_is_no_job_and_what_is_damaged_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert "no plans/ in it" in refused(capsys, tmp_path)
    folder = job(tmp_path, RECEIPT)
    path = folder / "receipts" / "000.json"
    path.write_text("{")
    assert f"{path}: " in refused(capsys, folder)
    path.write_text('{"step": 3}')
    assert "it lacks from_version, to_version, reason" in refused(capsys, folder)
