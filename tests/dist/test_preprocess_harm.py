"""The preprocessor under a full disk, lost workers, signals: one line, nothing half-written."""

import fcntl
import os
import resource
import signal
import subprocess
import time

import pytest
from preprocessing import (
    LIMIT_S,
    Forked,
    children_of,
    command,
    forked,
    is_running,
    one_line,
    size_of,
    started,
    texts_of,
    wait_for,
)

from megatron.resilience.data.preprocess.sources import stdlib_root

pytestmark = pytest.mark.dist


@pytest.fixture(scope="session")
def long_corpus():
    """Arguments that keep the tool writing for several seconds (about 300 MB of text)."""
    return [arg for _ in range(10) for arg in ("--input", stdlib_root())] + ["--glob", "*.py"]


def test_a_full_disk_is_one_line_and_nothing_is_left(tmp_path, long_corpus):
    mount = tmp_path / "small"
    mount.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(mount)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root; the file size limit is tested below")
    try:
        run = command(*long_corpus, "--output-prefix", mount / "d")
        left = os.listdir(mount)
    finally:
        subprocess.run(["umount", str(mount)], check=True)
    assert run.returncode == 2, run.stderr
    one_line(run.stderr, "d.bin.partial", "No space left on device")
    assert not left


@pytest.mark.parametrize("limit_bytes", [5_000_000, 200])
def test_a_file_size_limit_is_one_line_and_nothing_is_left(tmp_path, out, limit_bytes):
    """The small limit lets no byte of the buffered data through before the files are closed."""

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))

    args = ("--stdlib", "--limit-mb", 5 if limit_bytes > 200 else 0.03)
    process = Forked(tmp_path, *args, "--output-prefix", out / "d", before=limit)
    code, _, stderr = process.wait()
    assert code == 2, stderr
    one_line(stderr, "d.bin.partial", "File too large")
    assert not os.listdir(out)


def test_a_killed_worker_ends_the_run_in_one_line(out, long_corpus):
    run = started(*long_corpus, "--output-prefix", out / "d", "--workers", 2)
    wait_for(lambda: size_of(out / "d.bin.partial") > 4_000_000, "writing")
    workers = children_of(run.pid)
    assert len(workers) == 2
    os.kill(workers[0], signal.SIGKILL)
    killed_s = time.monotonic()
    _, stderr = run.communicate(timeout=LIMIT_S)
    assert time.monotonic() - killed_s < 10
    assert run.returncode == 1
    one_line(stderr, f"worker {workers[0]}", "SIGKILL")
    assert not os.listdir(out)
    assert not any(map(is_running, workers))


def test_a_stopped_worker_is_not_waited_for_beyond_the_limit(tmp_path, out, long_corpus):
    args = (*long_corpus, "--output-prefix", out / "d", "--workers", 2)
    run = Forked(tmp_path, *args, "--worker-timeout-s", 2)
    wait_for(lambda: size_of(out / "d.bin.partial") > 4_000_000, "writing")
    workers = children_of(run.process.pid)
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    code, _, stderr = run.wait()
    assert code == 1
    one_line(stderr, "no worker delivered for 2 s")
    assert not os.listdir(out)
    assert not any(map(is_running, workers))


def test_sigterm_in_the_middle_leaves_nothing(out, long_corpus):
    run = started(*long_corpus, "--output-prefix", out / "d", "--workers", 2)
    wait_for(lambda: size_of(out / "d.bin.partial") > 4_000_000, "writing")
    workers = children_of(run.pid)
    run.terminate()
    _, stderr = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 128 + signal.SIGTERM
    one_line(stderr, "SIGTERM", "no dataset")
    assert not os.listdir(out)
    assert not any(map(is_running, workers))


def test_after_sigkill_no_dataset_exists_workers_go_and_the_next_run_takes_over(
    tmp_path, out, long_corpus
):
    run = Forked(tmp_path, *long_corpus, "--output-prefix", out / "d", "--workers", 2)
    wait_for(lambda: size_of(out / "d.bin.partial") > 4_000_000, "writing")
    workers = children_of(run.process.pid)
    run.process.kill()
    assert run.wait()[0] == -signal.SIGKILL
    wait_for(lambda: not any(map(is_running, workers)), "workers gone")
    assert os.listdir(out) == ["d.bin.partial"]
    (tmp_path / "a.txt").write_text("next")
    code, _, stderr = forked(tmp_path, "--input", tmp_path / "a.txt", "--output-prefix", out / "d")
    assert code == 0, stderr
    assert texts_of(out / "d") == [b"next"]
    assert sorted(os.listdir(out)) == ["d.bin", "d.idx"]


def test_two_runs_of_one_prefix_exclude_each_other(tmp_path, out):
    (tmp_path / "a.txt").write_text("x")
    with open(out / "d.bin.partial", "wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        args = ("--input", tmp_path / "a.txt", "--output-prefix", out / "d")
        code, _, stderr = forked(tmp_path, *args)
    assert code == 2
    one_line(stderr, "d.bin.partial", "another run")
    assert os.listdir(out) == ["d.bin.partial"]
