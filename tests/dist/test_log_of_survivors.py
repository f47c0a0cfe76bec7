"""What a user sees of a job whose writing rank dies: every step, and no traceback.

Its batch grows while it runs, as the survivors have to count on.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ENTRY

from megatron.resilience.executor.start import without
from megatron.resilience.preset import read_preset
from megatron.resilience.testing.corpus import write_corpus

pytestmark = pytest.mark.dist

LIMIT_S = 100.0
LAST, FAULT_STEP = 2, 4
FAULT = f"- {{at_step: {FAULT_STEP}, phase: forward, rank: {LAST}, kind: kill}}"
SEQ_LENGTH = 128
BATCHES = [4, 4, 4, 4, 6, 6, 6, 6]
STEPS = len(BATCHES)

WRITER = """
import json, os, sys, types
class SummaryWriter:
    def __init__(self, log_dir, **_how):
        self.path = os.path.join(log_dir, os.environ["RANK"])
    def add_scalar(self, tag, value, step=None, *_more):
        with open(self.path, "a") as file:
            file.write(json.dumps([tag, float(value), step]) + "\\n")
    def add_text(self, *_what, **_how): ...
    def flush(self): ...
    def close(self): ...
module = types.ModuleType("torch.utils.tensorboard")
module.SummaryWriter = SummaryWriter
sys.modules[module.__name__] = module
"""
"""Stands for TensorBoard, which is no dependency: one file a rank."""


def words(data: Path, folder: Path) -> list[str]:
    """A job that is counted in samples: four steps of four, then of six."""
    growth = f"0:{BATCHES[0]} {4 * BATCHES[0] * SEQ_LENGTH}:{BATCHES[-1]}"
    counted = ("--global-batch-size", "--train-iters", "--lr-warmup-fraction")
    found = [*without(read_preset("tiny"), counted), "--data-path", str(data), "--device", "cpu"]
    found += ["--split", "100,0,0"]
    found += ["--packed-sequences", "--eval-iters", "0", "--seq-length", str(SEQ_LENGTH)]
    found += ["--micro-batch-size", "1", "--step-batch-size-schedule", growth]
    found += ["--train-samples", str(sum(BATCHES)), "--lr-warmup-samples", "8"]
    found += ["--lr-decay-samples", "60", "--tensorboard-dir", str(folder / "board")]
    found += ["--tensorboard-log-interval", "1", "--resilience", "--resilience-faults"]
    return [*found, str(folder / "faults.yaml")]


@pytest.fixture
def said(tmp_path: Path) -> tuple[str, str]:
    """Standard output and error of the job."""
    (tmp_path / "faults.yaml").write_text(FAULT)
    (tmp_path / "board").mkdir()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(WRITER)
    data = write_corpus(tmp_path / "data", documents=150)
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {k: v for k, v in os.environ.items() if k != "LOGLEVEL"}
    launcher = [sys.executable, "-m", "resihp_ext.launcher.run", "--nproc-per-node", "3"]
    job = subprocess.run(
        [*launcher, str(ENTRY), *words(data, tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=LIMIT_S,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    assert job.returncode == 0, job.stdout[-2000:] + job.stderr[-3000:]
    return job.stdout, job.stderr


@pytest.mark.timeout(180)
def test_every_step_is_seen_and_nothing_frightens(said: tuple[str, str], tmp_path: Path) -> None:
    out, err = said
    lines = re.findall(r"iteration +(\d+)/ +\d+ \|.* global batch size: +(\d+)", out)
    assert [int(step) for step, _ in lines] == list(range(1, STEPS + 1))
    assert [int(size) for _, size in lines] == BATCHES
    board = {path.name: path.read_text().splitlines() for path in (tmp_path / "board").iterdir()}
    steps = {rank: losses(text) for rank, text in board.items()}
    first, second = steps.pop(str(LAST)), steps.pop(str(LAST - 1))
    assert not steps, "nobody else writes"
    assert first == list(range(1, FAULT_STEP))
    assert second == list(range(FAULT_STEP - 1, STEPS + 1)), "the last step may not have been there"
    assert "Traceback" not in out + err
    assert "FlowError" not in out + err
    assert len(re.findall(rf"rank {LAST} .*was killed by signal 9 .*; the others go on", err)) == 1
    assert len(re.findall(r"resihp: step \d+: plan 0 to", out)) == 1


def losses(lines: list[str]) -> list[int]:
    """Steps of which a loss was written."""
    return [step for tag, _, step in map(json.loads, lines) if tag == "lm loss"]
