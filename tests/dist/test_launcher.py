"""``resihp-run`` with real processes: exit codes, the one line, signals, no orphans.

The workers are tiny scripts without torch, so that a test costs little more than the launcher.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

TIME_LIMIT_S = 60

WORKER = """
import os, pathlib, signal, subprocess, sys, time
rank, how, folder = int(os.environ["RANK"]), sys.argv[1], pathlib.Path(sys.argv[2])
def say(stream, line):  # one write a line: print makes several under PYTHONUNBUFFERED
    os.write(stream.fileno(), (line + "\\n").encode())
if how == "ok":
    size, threads = os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"]
    say(sys.stdout, f"rank {rank} of {size} omp {threads}")
    sys.exit(0)
if how == "usage":
    say(sys.stderr, f"error: rank {rank}: bad flag")
    sys.exit(2)
if how == "crash" and rank == 1:
    sys.exit(7)
if how == "killed" and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher's words only, no KeyboardInterrupt
helper = None
if how == "stubborn":  # ignores both signals; has a helper elsewhere
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    helper = subprocess.Popen(["sleep", "300"], start_new_session=True)
name = folder / f"pid{rank}.part"
name.write_text("\\n".join(str(p) for p in [os.getpid()] + ([helper.pid] if helper else [])))
name.rename(folder / f"pid{rank}")
time.sleep(300)
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start resihp-run with the worker script; whatever is left at the end is killed."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "LOGLEVEL")}
    started = []

    def start_one(*arguments: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-m", "resihp_ext.launcher.run", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment | {"TMPDIR": str(tmp_path)},
        )
        started.append(process)
        return process

    yield start_one
    for process in started:
        process.kill()
        process.wait(timeout=TIME_LIMIT_S)
    for pid in worker_pids(tmp_path):
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


def job(folder: Path, how: str, *flags: str) -> tuple[str, ...]:
    return ("--nproc-per-node", "2", *flags, "worker.py", how, str(folder))


def worker_pids(folder: Path) -> list[int]:
    return [int(pid) for file in folder.glob("pid?") for pid in file.read_text().split()]


def alive(pid: int) -> bool:
    """A zombie is dead: only its parent's bookkeeping is missing."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def wait_for_workers(folder: Path, process: "subprocess.Popen[str]") -> list[int]:
    deadline_s = time.monotonic() + TIME_LIMIT_S
    while len(list(folder.glob("pid?"))) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline_s, "workers did not start"
        time.sleep(0.05)
    return worker_pids(folder)


def test_success_forwards_output_and_says_nothing_itself(start: Start, tmp_path: Path) -> None:
    process = start(*job(tmp_path, "ok"))
    out, err = process.communicate(timeout=TIME_LIMIT_S)
    assert sorted(out.splitlines()) == ["rank 0 of 2 omp 1", "rank 1 of 2 omp 1"]
    assert (process.returncode, err) == (0, "")
    assert not list(tmp_path.glob("resihp-run-*")), "a log folder was left behind"


def test_usage_error_of_workers_is_the_only_thing_said(start: Start, tmp_path: Path) -> None:
    process = start(*job(tmp_path, "usage"))
    out, err = process.communicate(timeout=TIME_LIMIT_S)
    assert (process.returncode, out) == (2, "")
    said = set(err.splitlines())
    assert said
    assert said <= {f"error: rank {rank}: bad flag" for rank in (0, 1)}


@pytest.mark.parametrize(
    ("how", "exit_code", "cause"),
    [
        ("crash", 7, "exited with code 7"),
        ("killed", 137, "was killed by signal 9 (SIGKILL)"),
    ],
)
def test_dead_worker_gives_one_line_and_its_exit_code(
    start: Start, tmp_path: Path, how: str, exit_code: int, cause: str
) -> None:
    process = start(*job(tmp_path, how))
    _, err = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == exit_code
    assert len(err.splitlines()) == 1
    assert err.startswith("error: rank 1 (pid ")
    assert cause in err
    assert "its output is above" in err
    assert not [pid for pid in worker_pids(tmp_path) if alive(pid)]


def test_redirected_output_is_pointed_at(start: Start, tmp_path: Path) -> None:
    process = start(*job(tmp_path, "crash", "--log-dir", "logs", "--redirects", "3"))
    _, err = process.communicate(timeout=TIME_LIMIT_S)
    assert err.strip().endswith("logs are under logs")
    assert len(list((tmp_path / "logs").rglob("stderr.log"))) == 2


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name)
def test_signal_ends_every_worker(start: Start, tmp_path: Path, signum: signal.Signals) -> None:
    process = start(*job(tmp_path, "sleep"))
    pids = wait_for_workers(tmp_path, process)
    process.send_signal(signum)
    _, err = process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 128 + signum
    assert err.splitlines() == [f"error: stopped by {signum.name}"]
    assert len(pids) == 2
    assert not [pid for pid in pids if alive(pid)]


def test_impatient_second_signal_leaves_no_orphan(start: Start, tmp_path: Path) -> None:
    """It interrupts the agent's own orderly shutdown, so the sweep behind it must be complete."""
    process = start(*job(tmp_path, "stubborn", "--shutdown-timeout", "2"))
    pids = wait_for_workers(tmp_path, process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=TIME_LIMIT_S)
    assert process.returncode == 130
    assert len(pids) == 4
    assert not [pid for pid in pids if alive(pid)]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--nope", "worker.py"], "unrecognized arguments: --nope"),
        (["missing.py"], "script 'missing.py' does not exist"),
        (["-m", "no_such_module"], "module 'no_such_module' does not exist"),
        (["--no-python", "no-such-program"], "program 'no-such-program' does not exist"),
        (["--nproc-per-node", "many", "worker.py"], "many"),
        (["--nnodes", "a:b", "worker.py"], "--nnodes 'a:b'"),
        (["--max-restarts=-1", "worker.py"], "max_restarts must be >= 0"),
        ([], "required: training_script"),
    ],
)
def test_bad_usage_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    reason: str,
) -> None:
    from resihp_ext.launcher.run import main

    (tmp_path / "worker.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOGLEVEL", "ERROR")  # keep this process's logging as it is
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
    assert said.err.startswith("error: ")
    assert reason in said.err
