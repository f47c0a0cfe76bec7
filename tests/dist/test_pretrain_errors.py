"""Every mistake of a user: exit code 2, one line, no traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ENTRY, ROOT, command, error_lines, exit_code_and_words

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import run_trial

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "data", documents=60)


def refused(argv: list[str], *expected: str, world_size: int = 1) -> str:
    """Checks that a job is refused with one line that says all of ``expected``."""
    codes, words = exit_code_and_words(argv, world_size)
    lines = error_lines(words)
    assert codes == [2] * world_size, words[-2000:]
    assert len(lines) == 1, words[-2000:]
    assert "Traceback" not in words
    for text in expected:
        assert text in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (["--no-such-flag"], "--no-such-flag"),
        (["--train-iters", "many"], "--train-iters"),
        (["--train-iters"], "--train-iters"),
        (["--device", "tpu"], "--device tpu"),
        (["--device", "cuda"], "torch sees no GPU"),
        (["--preset", "huge"], "--preset huge"),
        (["--num-attention-heads", "7"], "num_attention_heads"),
        (["--min-lr", "1.0"], "min_lr"),
        (["--micro-batch-size", "3"], "must be divisible by eval_micro_batch_size (3)"),
        (["--packed-sequences", "--fim-data"], "--fim-data"),
        (["--sft"], "--sft"),
        (["--resilience-verify-checkpoint", "some"], "--resilience-verify-checkpoint"),
        (["--resilience-verify-checkpoint-timeout-s", "-1"], "timeout"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_flags(data: Path, extra: list[str], expected: str) -> None:
    refused(command(data, *extra), expected)


def test_tensor_parallel_degree_that_does_not_divide_the_heads(data: Path) -> None:
    argv = command(data, "--num-attention-heads", "3", "--num-query-groups", "3", tp=2)
    line = refused([*argv, "--hidden-size", "96"], "num_attention_heads (3)", world_size=2)
    assert "tensor_model_parallel_size (2)" in line


def test_help_names_our_flags_beside_upstreams() -> None:
    codes, words = exit_code_and_words(["--help"])
    assert codes == [0], words[-2000:]
    for flag in ("--packed-sequences", "--resilience-dir", "--device", "--num-layers"):
        assert flag in words


def test_missing_data(tmp_path: Path) -> None:
    refused(command(tmp_path / "nothing"), f"{tmp_path}/nothing.idx", "preprocess_data.py")


def test_no_data_at_all() -> None:
    refused(["--preset", "tiny"], "--data-path")


def test_data_that_is_no_index(tmp_path: Path, data: Path) -> None:
    (tmp_path / "text.idx").write_bytes(b"this is no index")
    (tmp_path / "text.bin").write_bytes(b"nor is this")
    refused(command(tmp_path / "text"), "text.idx is not a Megatron index")


def test_split_without_documents(data: Path) -> None:
    argv = command(data, "--packed-sequences", "--split", "99.9,0.1,0", "--eval-iters", "1")
    refused(argv, "valid split")


def test_one_line_for_a_whole_node(data: Path) -> None:
    refused(command(data, "--no-such-flag"), "--no-such-flag", world_size=4)


def test_missing_checkpoint(tmp_path: Path, data: Path) -> None:
    refused(command(data, "--load", str(tmp_path / "nothing")), f"{tmp_path}/nothing")


@pytest.fixture(scope="module")
def saved(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    run_trial(command(data, "--save", str(folder), "--save-interval", "2", steps=4), world_size=1)
    return folder


def copy_of(saved: Path, target: Path) -> Path:
    subprocess.run(["cp", "-r", str(saved), str(target)], check=True)
    return target


def shard(folder: Path, iteration: int) -> Path:
    """The largest shard of a checkpoint."""
    shards = (folder / f"iter_{iteration:07d}").glob("*.distcp")
    return max(shards, key=lambda path: path.stat().st_size)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def test_only_checkpoint_is_torn(saved: Path, tmp_path: Path, data: Path) -> None:
    folder = copy_of(saved, tmp_path / "torn")
    for iteration in (2, 4):
        path = shard(folder, iteration)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    path = shard(folder, 4)
    refused(command(data, "--load", str(folder)), path.name, str(folder), world_size=2)


def test_missing_shard(saved: Path, tmp_path: Path, data: Path) -> None:
    folder = copy_of(saved, tmp_path / "missing")
    path = shard(folder, 4)
    path.unlink()
    line = refused(command(data, "--load", str(folder), "--ckpt-step", "4"), path.name)
    assert "leave --ckpt-step out" in line


def test_newest_sound_checkpoint_is_used(saved: Path, tmp_path: Path, data: Path) -> None:
    folder = copy_of(saved, tmp_path / "damaged")
    damaged = shard(folder, 4)
    flip(damaged)
    argv = command(data, "--load", str(folder), steps=4)
    codes, words = exit_code_and_words(argv, world_size=2)
    assert codes == [0, 0], words[-2000:]
    assert damaged.name in words
    assert "iteration        3/       4" in words, "resumed from the sound checkpoint of step 2"
    assert "iteration        2/       4" not in words


def test_checkpoint_of_another_schedule(saved: Path, data: Path) -> None:
    line = refused(
        command(data, "--load", str(saved), steps=9), "Megatron refuses the job", world_size=4
    )
    assert "checkpoint" in line


def test_first_launch_with_load_and_save_starts_fresh(tmp_path: Path, data: Path) -> None:
    folder = str(tmp_path / "new")
    argv = command(data, "--load", folder, "--save", folder, "--save-interval", "2", steps=2)
    codes, words = exit_code_and_words(argv)
    assert codes == [0], words[-2000:]
    assert "training starts from iteration 0" in words


@pytest.mark.parametrize("launcher", ["python", "resihp-run"])
def test_the_real_command_line(launcher: str, data: Path) -> None:
    """Once without the harness: what the shell sees."""
    run = Path(sys.executable).with_name("resihp-run")
    start = [sys.executable] if launcher == "python" else [str(run), "--nproc-per-node", "2"]
    argv = [*start, str(ENTRY), *command(data, "--no-such-flag")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=110, cwd=ROOT, check=False)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert len(error_lines(done.stderr)) == 1, done.stderr
