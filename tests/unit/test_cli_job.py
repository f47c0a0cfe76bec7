"""``resihp status``, ``drain`` and ``join`` where no job can be asked: a line and an exit code."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.resilience.cli.main import main
from resihp_ext.control.ask import Address, write_address, write_token

pytestmark = pytest.mark.unit

VERBS = (("status",), ("drain", "n1"), ("join", "n1"), ("join",))
TOKEN = bytes(32)


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *verb: str) -> tuple[int, str]:
    name, *node = verb
    exit_code = main([name, str(folder), *node])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return exit_code, err


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def left_over(folder: Path, **changes: str) -> Path:
    """What a job leaves that was killed."""
    write_token(folder / "coordinator.token", TOKEN)
    found = {"address": "127.0.0.1", "token_file": str(folder / "coordinator.token")} | changes
    write_address(folder, Address(port=closed_port(), **found))
    return folder


@pytest.mark.parametrize("verb", VERBS)
def test_a_directory_that_is_none_of_a_job(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    assert refused(capsys, tmp_path / "no", *verb) == (
        2,
        f"error: {tmp_path / 'no'}: no such directory; give the job's --resilience-dir\n",
    )
    exit_code, line = refused(capsys, tmp_path, *verb)
    assert exit_code == 2
    assert "neither coordinator.json nor events.jsonl: no job runs with" in line


@pytest.mark.parametrize("verb", VERBS)
def test_a_job_that_is_over(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    (tmp_path / "events.jsonl").touch()
    exit_code, line = refused(capsys, tmp_path, *verb)
    assert exit_code == 3
    assert "the job is over, or its ranks have not started yet" in line


@pytest.mark.parametrize("verb", VERBS)
def test_a_coordinator_that_is_gone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, verb: tuple[str, ...]
) -> None:
    exit_code, line = refused(capsys, left_over(tmp_path, host="node-a"), *verb)
    assert exit_code == 1
    assert "error: no coordinator answers at 127.0.0.1:" in line
    assert "only node-a itself reaches that address: ask there" in line
    _, line = refused(capsys, left_over(tmp_path, host=socket.gethostname()), *verb)
    assert f"ended without a word, or {socket.gethostname()} is lost or out of reach" in line


@contextmanager
def somebody_else() -> Iterator[None]:
    """Root may read everything: it becomes nobody for a while."""
    mine = os.geteuid()
    os.seteuid(65534 if mine == 0 else mine)
    try:
        yield
    finally:
        os.seteuid(mine)


def test_a_directory_of_somebody_else(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "job").mkdir(parents=True)
    left_over(theirs / "job")
    theirs.chmod(0)
    try:
        with somebody_else():
            exit_code, line = refused(capsys, theirs / "job", "status")
    finally:
        theirs.chmod(0o700)
    assert (exit_code, "only the job's owner can look into it" in line) == (2, True)


def test_the_folder_above_is_taken_for_a_mistake(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "resilience").mkdir()
    left_over(tmp_path / "resilience")
    exit_code, line = refused(capsys, tmp_path, "status")
    assert exit_code == 2
    assert f"did you mean {tmp_path / 'resilience'}?" in line


def test_a_token_that_is_missing_or_broken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    token = left_over(tmp_path) / "coordinator.token"
    token.write_text("secret\n")
    assert refused(capsys, tmp_path, "status") == (
        2,
        f"error: {token}: not a token in hexadecimal\n",
    )
    token.unlink()
    exit_code, line = refused(capsys, tmp_path, "status")
    assert exit_code == 2
    assert line.endswith("No such file or directory; only the job's owner has the token\n")


def test_a_directory_that_is_mounted_elsewhere(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    left_over(tmp_path, token_file="/on/the/first/node/coordinator.token")
    exit_code, line = refused(capsys, tmp_path, "status")
    assert exit_code == 1  # the token was found, but nobody to show it to
    assert "no coordinator answers at" in line


@pytest.mark.parametrize("text", ["", "{", "[]", json.dumps({"address": "h", "port": "x"})])
def test_a_file_that_no_coordinator_has_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    (tmp_path / "coordinator.json").write_text(text)
    exit_code, line = refused(capsys, tmp_path, "status")
    assert (exit_code, "not what a coordinator writes" in line) == (2, True)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["status"], "Missing argument 'DIR'"),
        (["drain", "x"], "Missing argument 'NODE'"),
        (["drain", "x", "y", "--wait", "-1"], "--wait"),
        (["join", "x", "y", "z"], "unexpected extra argument"),
    ],
)
def test_bad_usage(capsys: pytest.CaptureFixture[str], words: list[str], reason: str) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert reason in err
