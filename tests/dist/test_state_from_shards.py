"""All owners and all copies of a part of the state die at once: it comes from disk, the steps since
are done again, and the loss is that of a run without failures. Where nothing can go on, the job
ends with a checkpoint from which it can."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import ENTRY, command

from megatron.resilience.checkpoint.tracker import read_tracker
from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import Trial, max_rel_diff, run_trial
from resihp_ext.errors import EXIT_GIVE_UP, EXIT_REQUEUE
from resihp_ext.events import Event, read_events

pytestmark = pytest.mark.dist

LIMIT_S = 120.0
RANKS, STEPS = 4, 7
ONE_REPLICA = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
"""So that every rank is the only owner of its part."""
TWO_REPLICAS = ["--tensor-model-parallel-size", "2"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command line that all jobs here share."""
    data = write_corpus(tmp_path_factory.mktemp("data") / "data", documents=150)
    return command(data, "--packed-sequences", "--device", "cpu", steps=STEPS)


@pytest.fixture(scope="module")
def reference(words: list[str]) -> Trial:
    """One process, without failures."""
    return run_trial(words)


class Job:
    """``resihp-run`` without copies in memory, and with faults on purpose."""

    def __init__(
        self,
        words: list[str],
        folder: Path,
        faults: str,
        *extra: str,
        launcher: tuple[str, ...] = ("-m", "resihp_ext.launcher.run"),
        environment: dict[str, str] | None = None,
    ) -> None:
        path = folder / "faults.yaml"
        path.write_text(faults)
        self.folder = folder / "resilience"
        argv = [*words, *extra, "--resilience", "--resilience-dir", str(self.folder)]
        argv += ["--resilience-faults", str(path), "--resilience-memory-copy-steps", "0"]
        inherited = {k: v for k, v in os.environ.items() if k != "LOGLEVEL"}
        self.ended = subprocess.run(
            [sys.executable, *launcher, "--nproc-per-node", str(RANKS), str(ENTRY), *argv],
            capture_output=True,
            text=True,
            cwd=folder,
            timeout=LIMIT_S,
            check=False,
            env=inherited | (environment or {}),
        )

    def iterations(self) -> list[dict[str, Any]]:
        found = read_events(self.folder / "events.jsonl")
        return [event for event in found if event["event"] == Event.ITERATION]

    def receipt(self) -> dict[str, Any]:
        """Of the first loss."""
        found: dict[str, Any] = json.loads((self.folder / "receipts" / "000.json").read_text())
        return found


def saving(folder: Path) -> list[str]:
    """Checkpoints after every third step."""
    return ["--save", str(folder / "checkpoints"), "--save-interval", "3"]


def kill(step: int, rank: int) -> str:
    return f"- {{at_step: {step}, phase: backward, micro_batch: 1, rank: {rank}, kind: kill}}\n"


def assert_as_without_failures(job: Job, reference: Trial) -> None:
    assert job.ended.returncode == 0, job.ended.stdout[-2000:] + job.ended.stderr[-3000:]
    iterations = job.iterations()
    assert [event["step"] for event in iterations] == list(range(1, STEPS + 1))
    losses = [event["losses"]["lm loss"] for event in iterations]
    assert max_rel_diff(losses, reference.losses) <= 1e-5
    assert max_rel_diff([one["grad_norm"] for one in iterations], reference.grad_norms) <= 5e-5


@pytest.mark.timeout(200)
def test_the_newest_checkpoint_brings_back_what_nobody_has(
    words: list[str], reference: Trial, tmp_path: Path
) -> None:
    job = Job(words, tmp_path, kill(step=5, rank=1), *ONE_REPLICA, *saving(tmp_path))
    assert_as_without_failures(job, reference)
    receipt = job.receipt()
    assert receipt["source"] == str(tmp_path / "checkpoints" / "iter_0000003")
    assert (receipt["step"], receipt["rewound_to_step"], receipt["redone_steps"]) == (4, 3, 2)


@pytest.mark.timeout(200)
def test_before_the_first_checkpoint_the_job_begins_with_its_initial_weights(
    words: list[str], reference: Trial, tmp_path: Path
) -> None:
    job = Job(words, tmp_path, kill(step=3, rank=2), *ONE_REPLICA)
    assert_as_without_failures(job, reference)
    receipt = job.receipt()
    assert receipt["source"] == "the initial weights"
    assert (receipt["step"], receipt["rewound_to_step"], receipt["redone_steps"]) == (2, 0, 3)


@pytest.mark.timeout(200)
def test_when_no_layout_is_left_the_survivors_save_what_they_hold(
    words: list[str], reference: Trial, tmp_path: Path
) -> None:
    planless = str(Path(__file__).with_name("resilient_run.py"))
    job = Job(
        words,
        tmp_path,
        kill(step=5, rank=1),
        *TWO_REPLICAS,
        *saving(tmp_path),
        launcher=(planless,),
        environment={"NO_PLAN": "1"},
    )
    assert job.ended.returncode == EXIT_REQUEUE, job.ended.stderr[-3000:]
    saved = tmp_path / "checkpoints" / "iter_0000004"
    last = job.ended.stderr.rstrip().splitlines()[-1]
    assert last.startswith("error: no layout fits what is left (rank 1 was killed by signal 9")
    assert f"the newest checkpoint is {saved}; start it again with --load" in last
    rest = run_trial([*words, "--load", str(tmp_path / "checkpoints")])
    assert [one["step"] for one in rest.events if one["event"] == Event.ITERATION] == [5, 6, 7]
    assert max_rel_diff(rest.losses, reference.losses[4:]) <= 1e-5
    assert max_rel_diff(rest.grad_norms, reference.grad_norms[4:]) <= 5e-5


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_survivors_without_a_whole_state_leave_the_newest_checkpoint_as_it_is(
    words: list[str], tmp_path: Path
) -> None:
    run = ("-m", "resihp_ext.launcher.run", "--control-conf", "same_failures=1")
    faults = kill(step=5, rank=1) + "- {at_step: 5, phase: recovery, rank: 2, kind: kill}\n"
    job = Job(words, tmp_path, faults, *ONE_REPLICA, *saving(tmp_path), launcher=run)
    assert job.ended.returncode == EXIT_GIVE_UP, job.ended.stderr[-3000:]
    folder = tmp_path / "checkpoints"
    assert [path.name for path in folder.glob("iter_*")] == ["iter_0000003"]
    assert read_tracker(folder).iteration == 3
    last = job.ended.stderr.rstrip().splitlines()[-1]
    assert last.startswith("error: 2 failures in a row without a finished step, at last: rank 1")
    assert f"the newest checkpoint is {folder / 'iter_0000003'}; find the reason" in last
