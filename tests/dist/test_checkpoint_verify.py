"""All ranks agree on one sound checkpoint: real processes, a real store, Megatron's own writer."""

import importlib.util
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from megatron.resilience.checkpoint.metadata import read_items
from megatron.resilience.checkpoint.verify import verify_checkpoint

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(
        importlib.util.find_spec("psutil") is None,
        reason="Megatron's torch_dist writer needs psutil",
    ),
]

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch", "megatron.core.dist_checkpointing"])
LONGEST_RUN_S = 100
VIEW = Path("/proc/self/cwd/run")
"""A path that leads each process to its own directory: a file system that is not shared."""


def run_ranks(
    body: Callable[..., Any], world_size: int, *arguments: Any, absent: tuple[int, ...] = ()
) -> dict[int, Any]:
    """Run ``body(rank, world_size, port, *arguments)`` in processes; what each returned."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes, pipes = {}, {}
    for rank in range(world_size):
        if rank in absent:
            continue
        pipes[rank], theirs = PROCESSES.Pipe()
        processes[rank] = PROCESSES.Process(
            target=_call, args=(theirs, body, (rank, world_size, store.port, *arguments))
        )
        processes[rank].start()
        theirs.close()
    deadline_s = time.monotonic() + LONGEST_RUN_S
    try:
        results = {}
        for rank, pipe in pipes.items():
            assert pipe.poll(max(0.0, deadline_s - time.monotonic())), f"rank {rank} hangs"
            results[rank] = pipe.recv()
        return results
    finally:
        for process in processes.values():
            process.join(timeout=5)
            process.kill()
            process.join(timeout=5)


def _call(pipe: Connection, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    pipe.send(body(*arguments))


def save_body(rank: int, world_size: int, port: int, directory: str, manifest: bool) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor, save

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    # The writer asks CUDA for a device and a synchronisation even where all tensors are on a CPU.
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    weight = torch.arange(4096, dtype=torch.float32).reshape(64, 64) + rank
    key, offset = "model.weight", (0, rank, world_size)
    state = {
        "weight": ShardedTensor.from_rank_offsets(key, weight, offset),
        "norm": ShardedTensor.from_rank_offsets("model.norm", torch.ones(64), replica_id=rank),
        "step": ShardedTensor.from_rank_offsets("step", torch.tensor(7), replica_id=rank),
        "random": ShardedObject("random", {"state": [rank] * 9}, (world_size,), (rank,)),
        "iteration": 10,
    }
    if rank == 0:
        os.makedirs(directory)
    dist.barrier()
    save(state, directory, verify_integrity=manifest)
    dist.destroy_process_group()


def agree_body(
    rank: int, world_size: int, port: int, load: str, save: str | None, options: dict[str, Any]
) -> tuple[str, Any, list[str], float]:
    """(kind of outcome, choice or line, reported lines, seconds)."""
    import torch.distributed as dist

    from megatron.resilience.checkpoint.agree import AgreementError, Seat, agree_on_checkpoint
    from resihp_ext.errors import UserError

    options = dict(options)
    if "directories" in options:
        os.chdir(options.pop("directories")[rank])
    store = dist.PrefixStore("attempt_0", dist.TCPStore("127.0.0.1", port, is_master=False))
    seat = Seat(
        store=store,
        rank=rank,
        world_size=world_size,
        timeout_s=options.pop("timeout_s", 30.0),
        host=f"host{rank}",
    )
    lines: list[str] = []
    started_s = time.monotonic()
    try:
        choice = agree_on_checkpoint(seat, load, save, report=lines.append, **options)
        outcome: tuple[str, Any] = ("choice", choice)
    except (UserError, AgreementError) as error:
        outcome = (type(error).__name__, str(error))
    return (*outcome, lines, time.monotonic() - started_s)


def agree(root: Path, world_size: int, absent: tuple[int, ...] = (), **options: Any) -> Any:
    save = options.pop("save", root)
    return run_ranks(agree_body, world_size, str(root), str(save), options, absent=absent)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint that Megatron wrote from two ranks, with the SHA-256 manifest."""
    directory = tmp_path_factory.mktemp("saved") / "iter_0000010"
    run_ranks(save_body, 2, str(directory), True)
    names = {".metadata", "metadata.json", "integrity.json", "__0_0.distcp", "__1_0.distcp"}
    assert {path.name for path in directory.iterdir()} == names
    return directory


@pytest.fixture
def root(saved, tmp_path) -> Path:
    for iteration in (10, 20):
        shutil.copytree(saved, tmp_path / "run" / f"iter_{iteration:07d}")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("20")
    return tmp_path / "run"


def damage_part(directory: Path, part: tuple[int, int]) -> str:
    """Change one byte of tensor data that only this part reads; the file's name."""
    for item in read_items(directory):
        path = directory / item.file
        content = bytearray(path.read_bytes())
        middle = item.offset_bytes + item.length_bytes // 2
        content[middle] ^= 1
        pristine = path.read_bytes()
        path.write_bytes(content)
        if verify_checkpoint(directory, part=part).damages:
            return item.file
        path.write_bytes(pristine)
    raise AssertionError(f"part {part} of {directory} holds nothing")


def test_megatron_checkpoint_is_sound_and_every_damage_is_found(saved, tmp_path):
    directory = shutil.copytree(saved, tmp_path / saved.name)
    result = verify_checkpoint(directory)
    assert result.damages == ()
    assert result.unchecked_bytes == 0
    assert result.checked_bytes > 2 * 4096 * 4
    labels = {item.label for item in read_items(directory)}
    assert {"model.weight[0, 0]", "model.weight[64, 0]"} <= labels
    assert "common_state/shard_0_1" in labels
    for file in sorted(path.name for path in directory.iterdir() if path.name != "integrity.json"):
        content = (directory / file).read_bytes()
        for broken in (content[: len(content) // 2], b"", None):
            (directory / file).unlink()
            if broken is not None:
                (directory / file).write_bytes(broken)
            assert file in {damage.file for damage in verify_checkpoint(directory).damages}
            (directory / file).write_bytes(content)
    assert verify_checkpoint(directory).damages == ()


@pytest.mark.parametrize("world_size", [1, 3])
def test_all_ranks_take_the_newest_and_rank_0_reports_the_speed(root, world_size):
    results = agree(root, world_size)
    choices = {result[1] for result in results.values()}
    assert [choice.iteration for choice in choices] == [20]
    assert [len(results[rank][2]) for rank in results] == [1] + [0] * (world_size - 1)
    assert "GB/s" in results[0][2][0]


def test_damage_in_the_part_of_one_rank_moves_all_ranks_to_the_older_one(root):
    file = damage_part(root / "iter_0000020", (2, 3))
    assert verify_checkpoint(root / "iter_0000020", part=(0, 3)).damages == ()
    results = agree(root, 3)
    assert len({result[1] for result in results.values()}) == 1
    assert results[1][1].iteration == 10
    assert results[1][2] == results[2][2] == []
    assert f"skipped iteration 20: {root}/iter_0000020/{file}: " in "\n".join(results[0][2])
    # The damaged one is set aside: the next save at 20 must not mix with it.
    assert not (root / "iter_0000020").exists()
    assert {result[1].iteration for result in agree(root, 2).values()} == {10}


def test_nothing_sound_is_the_same_error_on_all_ranks(root):
    file = damage_part(root / "iter_0000020", (1, 2))
    (root / "iter_0000010" / "__0_0.distcp").unlink()
    results = agree(root, 2)
    assert results[0][:2] == results[1][:2]
    assert results[0][0] == "UserError"
    assert f"iter_0000020/{file}" in results[0][1]
    assert "\n" not in results[0][1]


def test_explicit_step_is_never_replaced(root):
    damage_part(root / "iter_0000010", (0, 2))
    results = agree(root, 2, ckpt_step=10)
    assert results[0][:2] == results[1][:2]
    assert "--ckpt-step 10: " in results[0][1]


@pytest.mark.parametrize(("absent", "named"), [(1, "rank 1 of 3"), (0, "rank 0 of 3")])
def test_a_silent_rank_is_named_in_bounded_time(root, absent, named):
    results = agree(root, 3, absent=(absent,), timeout_s=1.0)
    assert len(results) == 2
    for kind, line, _, elapsed_s in results.values():
        assert kind == "AgreementError"
        assert named in line
        assert elapsed_s < 6
    assert (root / "iter_0000020").exists()


def test_checkpoint_that_one_host_does_not_see(root, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    for directories, present, missing in (
        ([tmp_path, tmp_path / "elsewhere"], 0, 1),
        ([tmp_path / "elsewhere", tmp_path], 1, 0),
    ):
        results = agree(VIEW, 2, directories=[str(path) for path in directories])
        assert results[0][:2] == results[1][:2]
        assert results[0][0] == "UserError"
        line = results[0][1]
        if present == 0:
            assert "exists on rank 0 (host0) but not on rank 1 (host1)" in line
        else:
            assert f"rank {present} (host1) sees checkpoints" in line
            assert f"rank {missing} (host0) does not" in line


def test_shard_that_one_host_does_not_see_is_no_damage(root, tmp_path):
    """Falling back would hide that every node writes to its own disk."""
    shutil.copytree(root, tmp_path / "elsewhere" / "run")
    (tmp_path / "elsewhere" / "run" / "iter_0000020" / "__1_0.distcp").unlink()
    directories = [str(tmp_path), str(tmp_path / "elsewhere")]
    results = agree(VIEW, 2, directories=directories)
    assert results[0][:2] == results[1][:2]
    assert "__1_0.distcp exists on rank 0 (host0) but not on rank 1 (host1)" in results[0][1]


def test_first_launch_starts_fresh_on_all_ranks(tmp_path):
    results = agree(tmp_path / "new", 2)
    assert [result[1].directory for result in results.values()] == [None, None]
    assert "training starts from iteration 0" in results[0][2][0]
