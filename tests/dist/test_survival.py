"""A rank dies in the middle of a step, and training goes on: as a user starts it, for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import ENTRY, command

from megatron.resilience.faults.register import Worker, read_workers
from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import max_rel_diff, run_trial
from resihp_ext.errors import UserError
from resihp_ext.events import Event, read_events
from resihp_ext.plan.plan import Plan

pytestmark = pytest.mark.dist

LIMIT_S = 150.0
RANKS, VICTIM, STEPS, FAULT_STEP = 4, 1, 8, 3
FAULT = f"- {{at_step: {FAULT_STEP}, phase: backward, micro_batch: 1, rank: {VICTIM}, kind: kill}}"


class Job:
    """``resihp-run`` with ``pretrain_gpt.py``, TP 2 x DP 2, and a fault on purpose."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "resilience"
        data = write_corpus(folder / "data", documents=150)
        self.words = command(data, "--packed-sequences", "--device", "cpu", steps=STEPS)
        faults = folder / "faults.yaml"
        faults.write_text(FAULT)
        argv = [*self.words, "--tensor-model-parallel-size", "2", "--resilience"]
        argv += ["--resilience-dir", str(self.folder), "--resilience-faults", str(faults)]
        launcher = [sys.executable, "-m", "resihp_ext.launcher.run"]
        self.process = subprocess.Popen(
            [*launcher, "--nproc-per-node", str(RANKS), str(ENTRY), *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={k: v for k, v in os.environ.items() if k != "LOGLEVEL"},
        )

    def first_workers(self) -> dict[int, Worker]:
        """The processes that begin, as they have written themselves down."""
        until_s = time.monotonic() + LIMIT_S
        while time.monotonic() < until_s and self.process.poll() is None:
            try:
                found = read_workers(self.folder)
            except UserError:
                found = {}
            if len(found) == RANKS:
                return found
            time.sleep(0.02)
        self.process.kill()
        pytest.fail("".join(self.process.communicate()))

    def events(self, kind: Event) -> list[dict[str, Any]]:
        found = read_events(self.folder / "events.jsonl")
        return [event for event in found if event["event"] == kind]

    def receipts(self) -> list[dict[str, Any]]:
        """Of losses: a new process for the dead rank may have come back before the end."""
        paths = sorted((self.folder / "receipts").glob("*.json"))
        found = [json.loads(path.read_text()) for path in paths]
        return [receipt for receipt in found if receipt["losses"]]


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Whatever is left of it at the end is ended."""
    started = Job(tmp_path)
    yield started
    started.process.send_signal(signal.SIGTERM)
    started.process.communicate(timeout=30)


@pytest.mark.timeout(300)
def test_a_rank_dies_in_backward_and_the_others_finish_the_job(job: Job) -> None:
    before = job.first_workers()
    out, err = job.process.communicate(timeout=LIMIT_S)
    assert job.process.returncode == 0, out[-3000:] + err[-3000:]
    victim = f"rank {VICTIM} (pid {before[VICTIM].pid}) was killed by signal 9 (SIGKILL)"
    assert f"{victim}; the others go on" in err
    assert "exited with code" not in err, "who takes its place must not fail"
    after = read_workers(job.folder)
    survivors = [rank for rank in range(RANKS) if rank != VICTIM]
    assert [after[rank].pid for rank in survivors] == [before[rank].pid for rank in survivors]
    iterations = job.events(Event.ITERATION)
    assert [event["step"] for event in iterations] == list(range(1, STEPS + 1))
    assert_receipt(job)
    one = run_trial(job.words)
    losses = [event["losses"]["lm loss"] for event in iterations]
    assert max_rel_diff(losses, one.losses) <= 1e-5
    assert max_rel_diff([event["grad_norm"] for event in iterations], one.grad_norms) <= 5e-5


def assert_receipt(job: Job) -> None:
    """One receipt says what was lost, what took how long, and what runs now."""
    (receipt,) = job.receipts()
    assert [loss["rank"] for loss in receipt["losses"]] == [VICTIM]
    assert "killed by signal 9" in receipt["losses"][0]["cause"]
    assert (receipt["step"], receipt["redone_steps"]) == (FAULT_STEP - 1, 1)
    seconds = receipt["phases_s"]
    assert {"notice", "detect", "abort", "move", "repeat"} <= seconds.keys()
    assert (receipt["fault"]["name"], receipt["fault"]["phase"]) == ("000", "backward")
    from_kill_s = receipt["repeated_s"] - receipt["fault"]["time_s"]
    assert sum(seconds.values()) == pytest.approx(from_kill_s, rel=0.05)
    assert all(0 <= value < LIMIT_S for value in seconds.values())
    assert receipt["total_s"] > 0
    path = job.folder / "plans" / f"{receipt['to_version']:03d}.json"
    plan = Plan.from_json(path.read_text())
    ranks = {rank for replica in plan.replicas for stage in replica.stages for rank in stage.ranks}
    assert VICTIM not in ranks
    assert ranks
    changes = [event["receipt"] for event in job.events(Event.TRANSITION)]
    assert changes == list(range(len(changes)))
    assert changes
