"""Ranks die and come back, one after the other: a few cycles of the benchmark, for real."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(300)]

BENCHMARK = Path(__file__).resolve().parents[2] / "tools" / "bench" / "rejoin.py"
CYCLES = 4


def test_survivors_and_launcher_hold_no_more_after_another_cycle(tmp_path: Path) -> None:
    words = [sys.executable, str(BENCHMARK), "--cycles", str(CYCLES), "--json"]
    ended = subprocess.run(
        [*words, "--keep", str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["cycles"] == CYCLES
    assert len(found["rejoin_s"]) == CYCLES
    assert max(found["growth"]["groups"], found["growth"]["fds"]) <= 0
    assert all(cycle["ranks"] and cycle["others"] for cycle in found["records"])
