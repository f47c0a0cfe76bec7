"""A disk that is full when checkpoints are due: training goes on, and only the last one counts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ENTRY, command

from megatron.resilience.checkpoint.choose import choose_checkpoint
from megatron.resilience.checkpoint.tracker import TRACKER_FILE
from megatron.resilience.checkpoint.verify import verify_checkpoint
from megatron.resilience.testing.corpus import write_corpus
from resihp_ext.events import Event, read_events

pytestmark = pytest.mark.dist

LIMIT_S = 100.0
STEPS = 7
FULL = {
    2: "__1_0.distcp",  # met by all ranks together
    4: "metadata.json",  # met by one, while the other waits for it
    7: "__0_0.distcp",  # the last one
}
"""What cannot be written of which checkpoint: opening it is possible, writing says ENOSPC."""


def test_a_full_disk_costs_checkpoints_and_not_the_job(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    for step, name in FULL.items():
        place = folder / f"iter_{step:07d}"
        place.mkdir(parents=True)
        (place / name).symlink_to("/dev/full")
    data = write_corpus(tmp_path / "data", documents=150)
    words = command(data, "--packed-sequences", "--device", "cpu", tp=2, steps=STEPS)
    words += ["--resilience", "--save", str(folder), "--save-interval", "2"]
    launcher = [sys.executable, "-m", "resihp_ext.launcher.run", "--nproc-per-node", "2"]
    job = subprocess.run(
        [*launcher, str(ENTRY), *words],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=LIMIT_S,
        env={k: v for k, v in os.environ.items() if k != "LOGLEVEL"},
    )
    said = job.stdout + job.stderr
    assert job.returncode == 1, said[-3000:]
    for step in FULL:
        assert said.count(f"resihp: step {step}: the checkpoint could not be saved: ") == 1
    assert "error: the last checkpoint, of step 7, could not be saved" in job.stderr
    assert "Traceback" not in said
    events = read_events(tmp_path / "resilience" / "events.jsonl")
    steps = [event["step"] for event in events if event["event"] == Event.ITERATION]
    assert steps == list(range(1, STEPS + 1))
    assert_chosen(folder, 6)
    # A disk may fill up under the tracker too; then every finished save is looked at.
    (folder / TRACKER_FILE).write_text("")
    assert_chosen(folder, 6)


def assert_chosen(folder: Path, step: int) -> None:
    choice = choose_checkpoint(
        folder, folder, verify=lambda path: verify_checkpoint(path, level="off").damages
    )
    assert choice.iteration == step
