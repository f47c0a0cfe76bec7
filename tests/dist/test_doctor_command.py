"""``resihp doctor`` on this very machine: real torch, real Megatron, real exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

DOCTOR = [sys.executable, "-m", "megatron.resilience.cli.main", "doctor", "--json"]
TIME_LIMIT_S = 90


def examine(environment: dict[str, str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        DOCTOR,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
        check=False,
        cwd=folder,
        env=os.environ | environment,
    )


def test_this_installation_is_sound_and_the_report_is_all_that_is_said(tmp_path: Path) -> None:
    ended = examine({}, tmp_path)
    report = json.loads(ended.stdout)
    failed = [each for each in report["findings"] if each["status"] == "fail"]
    assert (ended.returncode, failed) == (0, [])
    assert ended.stderr == ""
    (patches,) = [each for each in report["findings"] if each["check"] == "patches"]
    assert patches["status"] == "ok"


def test_checkout_on_the_path_fails_by_name(tmp_path: Path) -> None:
    core = tmp_path / "Megatron-LM" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    ended = examine({"PYTHONPATH": str(tmp_path / "Megatron-LM")}, tmp_path)
    assert ended.returncode == 1
    failed = [each for each in json.loads(ended.stdout)["findings"] if each["status"] == "fail"]
    assert [each["check"] for each in failed] == ["megatron.core"]
    assert str(core) in failed[0]["summary"]
