"""Uneven plans through ``pretrain``: hard layouts, one deliberate error, and what a user sees.

Random plans of all kinds and all deliberate errors are a benchmark: tools/bench/hetero_parity.py.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from jobs import error_lines, exit_code_and_words

from megatron.resilience.testing import mutants
from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.parity import MODEL, Reference, timetable
from megatron.resilience.testing.trial import run_trial
from resihp_ext.events import Event

pytestmark = pytest.mark.dist

STEPS = 4
TIED = "--no-untie-embeddings-and-output-weights"

DEGREES_3_2_1 = """
- step: 0
  replicas:
    - [{ranks: [2, 0, 1], layers: 2}, {ranks: [3, 4], layers: 1}, {ranks: [5], layers: 1}]
    - [{ranks: [7, 6], layers: 4}]
  shares: [5, 3]
"""
CROSSING_WITH_STANDBY = """
- step: 0
  replicas:
    - [{ranks: [0, 1], layers: 3}, {ranks: [2], layers: 1}]
    - [{ranks: [6], layers: 2}, {ranks: [3], layers: 1}, {ranks: [5, 4], layers: 1}]
  routes: ["0.0 0.1", "0.0 1.2", "1.0 1.1 0.1", "1.0 1.1 1.2", "0.0 0.1", "1.0 1.1 0.1",
           "1.0 1.1 0.1", "0.0 0.1"]
"""
UNEVEN_CHUNKS = """
- step: 0
  replicas:
    - - {ranks: [0, 1], layers: 1}
      - {ranks: [2], layers: 1}
      - {ranks: [0, 1], layers: 1}
      - {ranks: [2], layers: 1}
    - [{ranks: [3], layers: 1}, {ranks: [4], layers: 3}]
  shares: [5, 3]
"""


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line that all jobs here have in common."""
    data = write_corpus(tmp_path_factory.mktemp("corpus") / "data", documents=150)
    batch = ["--global-batch-size", "8", "--train-iters", str(STEPS)]
    return [*MODEL, "--data-path", str(data), *batch, "--packed-sequences", TIED]


@pytest.fixture(scope="module")
def reference(words: list[str]) -> Reference:
    return Reference(one=run_trial(words))


def schedule(folder: Path, text: str) -> list[str]:
    path = folder / "plans.yaml"
    path.write_text(text)
    return ["--resilience-plan-schedule", str(path)]


@pytest.mark.timeout(300)
def test_degrees_of_three_two_and_one_under_sequence_parallelism(
    words: list[str], reference: Reference, tmp_path: Path
) -> None:
    argv = [*words, *schedule(tmp_path, DEGREES_3_2_1), "--sequence-parallel"]
    assert reference.verdict(run_trial(argv, world_size=8)).broken == []


@pytest.mark.timeout(300)
def test_chunks_beside_a_replica_without(
    words: list[str], reference: Reference, tmp_path: Path
) -> None:
    argv = [*words, *schedule(tmp_path, UNEVEN_CHUNKS)]
    assert reference.verdict(run_trial(argv, world_size=5)).broken == []


@pytest.mark.timeout(300)
def test_crossing_routes_with_shared_state_and_a_standby(
    words: list[str], reference: Reference, tmp_path: Path
) -> None:
    """Also: what is in the event log when no replica has seen all of a micro-batch."""
    shared = ["--use-distributed-optimizer", "--resilience-optimizer-redundancy", "checkpoint"]
    argv = [*words, *schedule(tmp_path, CROSSING_WITH_STANDBY), *shared]
    trial = run_trial(argv, world_size=8)
    assert reference.verdict(trial).broken == []
    steps = [event["step"] for event in trial.events if event["event"] == Event.ITERATION]
    assert steps == list(range(1, STEPS + 1)), "one rank writes each step, once"
    seen: Counter[int] = Counter()
    for event in trial.events:
        if event["event"] == Event.MICRO_BATCHES:
            seen[event["step"]] += len(event["micro_batches"])
            for one in event["micro_batches"]:
                assert sum(one["segments"]) == one["tokens"] == 96
    assert seen == dict.fromkeys(steps, 8), "every micro-batch is counted once"


@pytest.mark.timeout(300)
def test_a_norm_that_counts_once_per_rank_is_not_seen_in_the_loss(
    words: list[str], reference: Reference, tmp_path: Path
) -> None:
    argv = [*words, *timetable(mutants.PLAN, tmp_path)]
    trial = run_trial(argv, world_size=7, before=mutants.norms_once_per_tp_rank)
    assert reference.verdict(trial).broken == ["rel_diff_grad_norm", "weight_diff_ratio"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("packed", [False, True], ids=["running text", "packed"])
def test_validation_loss_is_that_of_one_process(
    words: list[str], packed: bool, tmp_path: Path
) -> None:
    argv = [word for word in words if packed or word != "--packed-sequences"]
    argv += ["--split", "80,20,0", "--eval-iters", "2", "--eval-interval", "2"]
    one = validation_losses(argv, 1, tmp_path)
    found = validation_losses([*argv, *schedule(tmp_path, CROSSING_WITH_STANDBY)], 7, tmp_path)
    assert [step for step, _ in one] == [2, 4, 4], "twice in training, once at the end"
    assert len({loss for _, loss in one}) == 3, "three different samples or models"
    assert found == [(step, pytest.approx(loss, rel=1e-5)) for step, loss in one]


def validation_losses(argv: list[str], world_size: int, folder: Path) -> list[tuple[int, float]]:
    """What the job prints, as it logs nothing else about evaluations."""
    argv = [*argv, "--resilience", "--resilience-dir", str(folder / f"{world_size} ranks")]
    codes, log = exit_code_and_words(argv, world_size)
    assert codes == [0] * world_size, log[-2000:]
    found = re.findall(r"validation loss at iteration (\d+) .*?lm loss value: (\S+)", log)
    return [(int(step), float(loss)) for step, loss in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- {step: 0, uniform: {tp: 2, pp: 3}}", "entry 0: uniform plan: 4 layers over 3 stages"),
        ("- {step: 0, uniform: {tp: 4}}", "entry 0: plan: replica 0 stage 0: rank 2 is not a live"),
        ("- {step: 0, uniform: }", "uniform: expected names with values, got None"),
        ("- {step: 1, uniform: {tp: 2}}", "the first entry must be for step 0, not 1"),
    ],
)
def test_wrong_timetables(words: list[str], tmp_path: Path, text: str, expected: str) -> None:
    argv = [*words, *schedule(tmp_path, text), "--resilience", "--resilience-dir", str(tmp_path)]
    codes, log = exit_code_and_words(argv, 2)
    assert codes == [2, 2], log[-2000:]
    (line,) = error_lines(log)
    assert "plans.yaml: " in line
    assert expected in line
    assert "Traceback" not in log


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (["--resilience", "--fp16"], "--fp16: use --bf16: cannot be combined with"),
        (["--resilience", "--overlap-grad-reduce"], "--overlap-grad-reduce: cannot be combined"),
        (["--resilience", "--async-save"], "--async-save: cannot be combined with --resilience"),
        ([], "--resilience-plan-schedule needs --resilience"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_do_not_go_with_plans(
    words: list[str], tmp_path: Path, extra: list[str], expected: str
) -> None:
    argv = [*words, *schedule(tmp_path, "- {step: 0, uniform: {}}"), *extra]
    codes, log = exit_code_and_words(argv)
    assert codes == [2], log[-2000:]
    (line,) = error_lines(log)
    assert expected in line
