"""The ``resihp`` command line: verbs, one-line refusals, and a fast ``--help``."""

import subprocess
import sys
import time

import pytest

from megatron.resilience.cli.main import main

pytestmark = pytest.mark.unit

HELP_LIMIT_S = 0.3


def test_help_is_fast_and_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "from megatron.resilience.cli.main import main\n"
        "assert main(['--help']) == 0\n"
        "heavy = {name.partition('.')[0] for name in sys.modules} & {'torch', 'numpy'}\n"
        "assert not heavy, heavy\n"
        "assert 'megatron.core' not in sys.modules\n"
    )
    durations_s = []
    for _ in range(5):  # the best of five: the limit is about our imports, not a busy machine
        started_s = time.perf_counter()
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
        )
        durations_s.append(time.perf_counter() - started_s)
        assert ended.returncode == 0, ended.stderr
        assert "doctor" in ended.stdout
    assert min(durations_s) < HELP_LIMIT_S, durations_s


def test_no_verb_prints_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Usage: resihp" in capsys.readouterr().out


def test_version_names_what_it_stands_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("resihp 0.")
    assert "megatron-core 0.19." in out
    assert "torch 2." in out


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["nope"], "No such command 'nope'"), (["doctor", "--nope"], "No such option '--nope'")],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], reason: str
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("error: ")
    assert reason in said.err
