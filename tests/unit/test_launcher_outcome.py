"""The launcher's verdict: whom it blames, what it prints, what it returns."""

import signal

import pytest

from resihp_ext.launcher.outcome import WorkerFailure, culprit_of, outcome_of, shell_exit_code

pytestmark = pytest.mark.unit


def failure(rank: int, exit_code: int, time_s: float = 100.0) -> WorkerFailure:
    return WorkerFailure(rank=rank, pid=1000 + rank, exit_code=exit_code, time_s=time_s)


@pytest.mark.parametrize(
    ("seen", "culprit_rank"),
    [
        pytest.param([failure(3, 7)], 3, id="only one"),
        pytest.param([failure(0, 1, 101), failure(1, 1, 100)], 1, id="the earlier second wins"),
        pytest.param([failure(0, 1), failure(1, -9)], 1, id="kill outranks what it caused"),
        pytest.param([failure(0, 1), failure(1, 2)], 1, id="usage error outranks lost peer"),
        pytest.param([failure(0, 2), failure(1, -9)], 1, id="kill outranks usage error"),
        pytest.param([failure(1, 1), failure(0, -15)], 1, id="our own SIGTERM is no cause"),
        pytest.param([failure(0, -15), failure(1, 1)], 0, id="a SIGTERM seen first is a cause"),
        pytest.param([failure(2, 1), failure(0, 1)], 2, id="otherwise first seen"),
    ],
)
def test_culprit(seen: list[WorkerFailure], culprit_rank: int) -> None:
    assert culprit_of(seen).rank == culprit_rank


def test_no_failure_has_no_culprit() -> None:
    with pytest.raises(ValueError, match="no failure"):
        culprit_of([])


def test_usage_error_is_silent_because_the_worker_spoke() -> None:
    outcome = outcome_of([failure(0, 2), failure(1, 2)], log_hint="logs")
    assert (outcome.exit_code, outcome.line) == (2, None)


def test_signal_is_named_with_rank_pid_and_hint() -> None:
    outcome = outcome_of([failure(4, -signal.SIGKILL), failure(0, -15)], log_hint="see x.log")
    assert outcome.exit_code == 137
    assert outcome.line == (
        "rank 4 (pid 1004) was killed by signal 9 (SIGKILL); "
        "1 other rank(s) ended with it; see x.log"
    )


def test_exit_code_is_named_and_kept() -> None:
    outcome = outcome_of([failure(1, 7)], log_hint="h")
    assert (outcome.exit_code, outcome.line) == (7, "rank 1 (pid 1001) exited with code 7; h")


def test_signal_without_a_name_still_gives_a_line() -> None:
    assert "signal 40 (unnamed)" in str(outcome_of([failure(0, -40)], log_hint="h").line)


@pytest.mark.parametrize(("raw", "shell"), [(0, 0), (5, 5), (-9, 137), (-15, 143)])
def test_shell_exit_code(raw: int, shell: int) -> None:
    assert shell_exit_code(raw) == shell
