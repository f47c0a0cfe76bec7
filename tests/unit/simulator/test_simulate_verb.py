"""``resihp simulate``: questions, figures, files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.resilience.cli.main import main
from resihp_ext.foresight.question import best_interval_s, question
from resihp_ext.foresight.runs import interval
from resihp_ext.report.run import read_run
from resihp_ext.report.write import as_page
from resihp_ext.simulator.restart import read_s
from resihp_ext.whatif.settings import Settings

pytestmark = pytest.mark.unit

JOB = {"tp": ["4"], "pp": ["2"], "dp": ["2"], "model": ["llama2-7b"], "hardware": ["a100"]}
JOB |= {"layers": ["8"], "sequence-parallel": ["true"], "sharded-optimizer": ["true"]}
FLAGS = [
    *(f"--{name}={value[0]}" for name, value in JOB.items() if value != ["true"]),
    "--sequence-parallel",
    "--sharded-optimizer",
    "--jobs=1",
    "--fault-every-s=900",
    "--slow-mtbf-h=20",
    "--hours=1",
    "--seeds=2",
]


def asked(**more: str) -> Settings:
    flags = {**JOB, **{name.replace("_", "-"): [value] for name, value in more.items()}}
    return Settings.of(flags, {})


def test_the_answer_is_one_object(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert (
        main(["simulate", *FLAGS, "--policy=restart,progressive", "--json", f"--out={tmp_path}"])
        == 0
    )
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["policies"]) == {"restart", "progressive"}
    ours, restart = found["policies"]["progressive"], found["policies"]["restart"]
    assert restart["goodput_ratio"] < ours["goodput_ratio"] <= 1.01
    assert ours["goodput_low"] <= ours["goodput_ratio"] <= ours["goodput_high"]
    assert ours["over_capacity"] <= 1.05
    assert restart["lost_device_hours"]["change"] > ours["lost_device_hours"]["change"]
    assert {one.name for one in tmp_path.iterdir()} == {
        "restart",
        "progressive",
        "goodput.svg",
        "lost_hours.svg",
    }
    run = read_run(tmp_path / "progressive")
    assert run.badges == ["simulated"]
    assert not run.notes
    assert run.receipts
    assert len(run.plans) == len(run.receipts) + 1
    steps = [one.step for one in run.iterations]
    assert steps == sorted(set(steps))
    assert "Changes of the layout" in as_page(run)


def test_the_same_question_has_the_same_answer(capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):
        assert main(["simulate", *FLAGS, "--policy=progressive"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].splitlines()[3].split()[:2] == ["policy", "goodput"]


def test_the_goal_is_answered_with_spares(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*FLAGS, "--policy=progressive", "--goal=0.5", "--json"]
    assert main(["simulate", *flags]) == 0
    assert json.loads(capsys.readouterr().out)["spares_needed"] == {"progressive": 0}


def test_spares_are_nodes_that_the_layout_does_not_touch() -> None:
    found = question(asked(nodes="4"))
    assert found.spare_nodes == 2
    assert found.with_spares(5).spare_nodes == 5
    assert found.with_spares(0).setting.nominal.replicas == found.setting.nominal.replicas


def test_checkpoints_are_as_often_as_young_and_daly_say() -> None:
    found = question(asked(fault_every_s="1800"))
    cost_s = max(read_s(found.setting), 1.0)
    assert found.interval_chosen
    assert found.setting.times.checkpoint_every_s == pytest.approx((2 * cost_s * 1800) ** 0.5)
    assert best_interval_s(found.setting, found.sources) == pytest.approx(
        found.setting.times.checkpoint_every_s
    )
    assert not question(asked(checkpoint_every_s="60")).interval_chosen


def test_an_interval_of_confidence_holds_the_mean() -> None:
    low, high = interval((0.9, 0.95, 1.0, 0.85))
    assert 0.85 <= low < 0.925 < high <= 1.0
    assert interval((0.9,)) == (0.9, 0.9)


@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--policy=best", "--policy: 'best' is unknown; choose from none, restart"),
        ("--goal=2", "--goal: 2: expected a part of 1"),
        ("--fault-every-s=-1", "--fault-every-s: expected 0 or a number above it, got '-1'"),
        ("--severity=awful", "--severity: 'awful' is unknown"),
        ("--hours=0", "--hours: expected a number above 0"),
    ],
)
def test_bad_questions_get_one_line(
    flag: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *FLAGS, flag]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {line}")
    assert said.count("\n") == 1
