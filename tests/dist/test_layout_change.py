"""A running job changes its layout: the loss curve, the receipts, and a checkpoint in between."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import Trial, max_rel_diff, max_weight_diff, run_trial

pytestmark = pytest.mark.dist

STEPS = 4
UNEVEN = {
    "replicas": [
        [{"ranks": [0, 1], "layers": 3}, {"ranks": [2], "layers": 1}],
        [{"ranks": [3, 4], "layers": 2}, {"ranks": [5], "layers": 2}],
    ],
    "shares": [1, 3],
}
SMALL = {"replicas": [[{"ranks": [4, 2], "layers": 1}, {"ranks": [0], "layers": 3}]]}


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line that all jobs here share."""
    data = write_corpus(tmp_path_factory.mktemp("data") / "data", seed=5)
    words = ["--preset", "tiny", "--data-path", str(data), "--split", "100,0,0"]
    words += ["--train-iters", str(STEPS), "--eval-iters", "0", "--clip-grad", "0.5"]
    return [*words, "--seq-length", "128"]


@pytest.fixture(scope="module")
def reference(words: list[str]) -> Trial:
    """One process, which never changes."""
    return run_trial(words)


def timetable(folder: Path, entries: Sequence[dict[str, Any]]) -> list[str]:
    path = folder / "layouts.yaml"
    path.write_text(json.dumps(entries))
    return ["--resilience-plan-schedule", str(path)]


def changes(trial: Trial) -> list[dict[str, Any]]:
    return [event for event in trial.events if event["event"] == "transition"]


@pytest.mark.parametrize(
    "extra", [[], ["--use-distributed-optimizer"]], ids=["replicated", "buddy"]
)
def test_the_loss_curve_stays(
    words: list[str], reference: Trial, tmp_path: Path, extra: list[str]
) -> None:
    plans = timetable(
        tmp_path,
        [
            {"step": 0, "uniform": {"tp": 1, "pp": 2, "dp": 2}},
            {"step": 1, **UNEVEN},
            {"step": 2, **SMALL},
            {"step": 3, **UNEVEN},
        ],
    )
    trial = run_trial([*words, *extra, *plans], world_size=6)
    assert max_rel_diff(trial.losses, reference.losses) <= 1e-5
    assert max_rel_diff(trial.grad_norms, reference.grad_norms) <= 5e-5
    assert max_weight_diff(trial.weights, reference.weights) < 1e-5
    assert trial.disagreements == 0
    assert [(one["step"], one["from_version"], one["to_version"]) for one in changes(trial)] == [
        (1, 0, 1),
        (2, 1, 2),
        (3, 2, 3),
    ]
    assert all(one["moved_bytes"] > 0 for one in changes(trial))


def test_a_checkpoint_between_is_resumed_under_the_plan_in_force(
    words: list[str], tmp_path: Path
) -> None:
    entries = [{"step": 0, "uniform": {"tp": 2, "pp": 2, "dp": 1}}, {"step": 1, **UNEVEN}]
    plans = timetable(tmp_path, entries)
    whole = run_trial([*words, *plans], world_size=6)
    saves = ["--save", str(tmp_path / "checkpoints"), "--save-interval", "2"]
    run_trial([*words, *plans, *saves, "--exit-interval", "2"], world_size=6)
    loads = ["--load", str(tmp_path / "checkpoints")]
    rest = run_trial([*words, *plans, *loads], world_size=6)
    assert len(rest.losses) == STEPS - 2
    assert max_rel_diff(rest.losses, whole.losses[2:]) <= 1e-6
    assert max_rel_diff(rest.grad_norms, whole.grad_norms[2:]) <= 5e-6
