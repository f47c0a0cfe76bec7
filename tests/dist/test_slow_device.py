"""A device that becomes slow in a job is named in the launcher's output; no other, and no link."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ENTRY

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.parity import MODEL

pytestmark = pytest.mark.dist

STEPS, SLOW_FROM, SLOW_RANK = 28, 21, 2
SCENE = "{model: llama2-7b, hardware: a100, time_scale: 0.2, noise: 0.01}"
FAULTS = f"[{{at_step: {SLOW_FROM}, kind: slow, rank: {SLOW_RANK}, factor: 0.5}}]"

WHO_IS_SLOW = re.compile("resihp: (ranks? |the link |all |both |step )")
"""Devices, links, nodes, or a step that nobody explains."""


@pytest.mark.slow
def test_a_slow_device_is_named(tmp_path: Path) -> None:
    scene, faults = tmp_path / "scene.yaml", tmp_path / "faults.yaml"
    scene.write_text(SCENE)
    faults.write_text(FAULTS)
    data = write_corpus(tmp_path / "data", documents=60)
    words = [*MODEL, "--data-path", str(data), "--device", "cpu", "--packed-sequences"]
    words += ["--train-iters", str(STEPS), "--global-batch-size", "4"]
    words += ["--pipeline-model-parallel-size", "2", "--resilience"]
    words += ["--resilience-dir", str(tmp_path / "resilience"), "--resilience-detect", "observe"]
    words += ["--resilience-emulate", str(scene), "--resilience-faults", str(faults)]
    launcher = [sys.executable, "-m", "resihp_ext.launcher.run", "--nproc-per-node", "4"]
    found = subprocess.run(
        [*launcher, str(ENTRY), *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-3000:]
    said = [line for line in found.stderr.splitlines() if line.startswith("resihp: rank")]
    # Neither a healthy device, nor a node, nor a link: what is transferred takes microseconds here.
    named = [line for line in found.stderr.splitlines() if WHO_IS_SLOW.match(line)]
    assert named == said, found.stderr[-3000:]
    assert len(said) == 1, found.stderr[-3000:]
    assert f"rank {SLOW_RANK} (node " in said[0]
    assert "works at 0.5" in said[0] or "works at 0.49" in said[0]
