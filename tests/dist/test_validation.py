"""A suspect is measured before it is believed to be slow, in a job as a user starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jobs import ENTRY

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.parity import MODEL
from resihp_ext.events import Event, read_events

pytestmark = pytest.mark.dist

SLOW_FROM, SLOW_RANK, FACTOR = 17, 2, 0.5
SCENE = "{model: llama2-7b, hardware: a100, time_scale: 0.2, noise: 0.01}"


def run_job(folder: Path, faults: str, steps: int) -> tuple[str, list[dict[str, Any]]]:
    """Four emulated ranks; returns what the launcher says, and the validations."""
    (folder / "scene.yaml").write_text(SCENE)
    (folder / "faults.yaml").write_text(faults)
    data = write_corpus(folder / "data", documents=60)
    words = [*MODEL, "--data-path", str(data), "--device", "cpu", "--packed-sequences"]
    words += ["--train-iters", str(steps), "--global-batch-size", "4"]
    words += ["--pipeline-model-parallel-size", "2", "--resilience"]
    words += ["--resilience-dir", str(folder / "resilience"), "--resilience-detect", "observe"]
    words += ["--resilience-emulate", str(folder / "scene.yaml")]
    words += ["--resilience-faults", str(folder / "faults.yaml")]
    launcher = [sys.executable, "-m", "resihp_ext.launcher.run", "--nproc-per-node", "4"]
    found = subprocess.run(
        [*launcher, str(ENTRY), *words, "--resilience-recheck-steps", "6"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-4000:]
    events = read_events(folder / "resilience" / "events.jsonl")
    return found.stderr, [one for one in events if one["event"] == Event.VALIDATION]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_slow_device_is_measured_and_its_recovery_too(tmp_path: Path) -> None:
    fault = f"at_step: {SLOW_FROM}, until_step: 31, kind: slow, rank: {SLOW_RANK}"
    said, found = run_job(tmp_path, f"[{{{fault}, factor: {FACTOR}}}]", steps=40)
    lines = [line for line in said.splitlines() if line.startswith("resihp: rank 2 (node ")]
    assert "measuring it" in lines[0], said[-3000:]
    assert "measured at 0.5" in lines[1] or "measured at 0.4" in lines[1]
    assert "slow indeed" in lines[1]
    assert "slow no more" in lines[-1]
    assert [one["kind"] for one in found] == ["device"] * len(found)
    first, *others, last = found
    assert (first["ranks"], first["verdict"], first["again"]) == ([SLOW_RANK], "slow", False)
    assert abs(first["p"]["2"] - FACTOR) < 0.1 * FACTOR
    assert all(one["again"] for one in (*others, last))
    assert last["verdict"] == "healthy"
    assert last["p"]["2"] > 0.9
    assert all(0 < one["took_s"] < 0.5 for one in found)


@pytest.mark.timeout(300)
def test_a_rank_that_dies_while_it_measures_is_lost_as_ever(tmp_path: Path) -> None:
    slow = f"{{at_step: {SLOW_FROM}, kind: slow, rank: {SLOW_RANK}, factor: {FACTOR}}}"
    kill = f"{{at_step: {SLOW_FROM}, phase: probe, rank: {SLOW_RANK}, kind: kill}}"
    said, _ = run_job(tmp_path, f"[{slow}, {kill}]", steps=28)
    assert "rank 2 (node " in said
    assert "measuring it" in said
    assert "was killed by signal 9 (SIGKILL); the others go on" in said
    struck = (tmp_path / "resilience" / "faults" / "000.done").read_text()
    assert "probe" in struck
    assert "not measured any more" not in said
