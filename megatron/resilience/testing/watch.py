"""Watches the transitions of a job from inside its ranks: what they kept, moved and left over.

Give ``functools.partial(watch, folder)`` to ``run_trial`` as ``before``; rank 0 leaves one record a
transition in ``folder``.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron.resilience.executor.driver import TimetableDriver
from megatron.resilience.executor.move import Move
from megatron.resilience.testing.state import Board, lacking_bytes, parts_of, stepped

Pairs = list[tuple[int, int, int]]
"""Source, destination and bytes of every message."""


def watch(folder: Path, *, raw: bool = False) -> None:
    """Watches every transition of this process from now on.

    Args:
        folder: An existing folder that all ranks can map files of.
        raw: Whether to send the same messages once more afterwards, without anything around them.
    """
    watcher = _Watcher(folder, raw)
    change, run = TimetableDriver.__call__, Move.run

    def called(driver: TimetableDriver, models: list[torch.nn.Module]) -> None:
        watcher.around(driver, models, lambda: change(driver, models))

    def moved(moving: Move) -> None:
        watcher.messages = [(one.source, one.destination, one.bytes) for one in moving.todo]
        run(moving)
        # Ranks that are ready would slow down the others with what they do next.
        dist.barrier()

    TimetableDriver.__call__ = called  # type: ignore[method-assign,assignment]
    Move.run = moved  # type: ignore[method-assign,assignment]


def records(folder: Path) -> list[dict[str, Any]]:
    """What was seen of every transition, in order."""
    return [json.loads(line) for line in (folder / "records.jsonl").read_text().splitlines()]


class _Watcher:
    def __init__(self, folder: Path, raw: bool) -> None:
        self._folder = folder
        self._raw = raw
        self._record: dict[str, Any] | None = None
        self.messages: Pairs = []

    def around(
        self, driver: TimetableDriver, models: list[torch.nn.Module], change: Callable[[], None]
    ) -> None:
        """Called before every step."""
        self._close_record()
        executor: Any = driver._executor
        done = len(driver.receipts)
        parts = parts_of(executor, models)
        board = Board(self._folder / "board", parts)
        written = board.write(parts)
        before = [(part.kind, part.slab) for part in parts]
        count, groups = _counts(executor)
        # Views would keep the old state alive.
        del parts
        dist.barrier()
        change()
        if len(driver.receipts) == done:
            return
        parts = parts_of(executor, models)
        found = board.compare(parts)
        same = stepped(executor) and _counts(executor) == (count, groups)
        after = [(part.kind, part.slab) for part in parts]
        half = bool(executor.optimizer.config.bf16)
        receipt = driver.receipts[-1]
        self._record = {
            "bitwise_equal": not written and not found and _all(same),
            "compared": found.compared,
            "differing": found.differing,
            "missing": found.missing,
            "lower_bound_bytes": _sum(lacking_bytes(before, after, board.shapes, half=half)),
            "moved_bytes": sum(size for _, _, size in self.messages),
            "messages": len(self.messages),
            "phases_s": {name: _most(took) for name, took in receipt["phases_s"].items()},
            "receipt": receipt,
            "standby": list(executor.plan.standby),
        }
        del parts
        if self._raw:
            self._record["raw_s"] = _most(raw_copy(self.messages))

    def _close_record(self) -> None:
        """A record is finished a step later, when whatever the step makes anew is there."""
        if self._record is None:
            return
        self._record["left"] = {name: _sum(count) for name, count in resources().items()}
        if dist.get_rank() == 0:
            with (self._folder / "records.jsonl").open("a") as file:
                file.write(json.dumps(self._record) + "\n")
        self._record = None


def _counts(executor: Any) -> tuple[Any, Any]:
    """Steps as the optimizers count them, and hyperparameters of each group."""
    optimizer = executor.optimizer
    counts = {float(state["step"]) for state in optimizer.optimizer.state.values()}
    groups = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    # A standby has no tensors to count for.
    return counts | {float(optimizer.steps)}, groups


def raw_copy(messages: Pairs) -> float:
    """Sends messages of the same sizes between the same ranks, all at once.

    Returns:
        Seconds on this rank.
    """
    rank = dist.get_rank()
    todo = [(k, *one) for k, one in enumerate(messages) if rank in one[:2]]
    tensors = [torch.ones(size, dtype=torch.uint8) for _, _, _, size in todo]
    dist.barrier()
    started = time.perf_counter()
    works: list[Any] = [
        dist.isend(tensor, to, tag=k) if source == rank else dist.irecv(tensor, source, tag=k)
        for (k, source, to, _), tensor in zip(todo, tensors, strict=True)
    ]
    for work in works:
        work.wait()
    return time.perf_counter() - started


def resources() -> dict[str, int]:
    """What this process holds on to.

    Resident memory is counted twice: as it is, and after the C library has handed back what it
    keeps of freed memory, which is a matter of its own and not held by anything.
    """
    world = torch.distributed.distributed_c10d._world
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "groups": len(world.pg_map),
        "untrimmed_bytes": resident_bytes(),
        "rss_bytes": resident_bytes(trim=True),
    }


def resident_bytes(*, trim: bool = False) -> int:
    """Memory of this process alone; files that ranks share are nobody's in particular."""
    if trim:
        ctypes.CDLL(None).malloc_trim(0)
    return _status_bytes("VmRSS") - _status_bytes("RssShmem")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _reduced(number: float, operation: Any) -> float:
    one = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(one, operation)
    return float(one)


def _sum(number: float) -> int:
    return int(_reduced(number, dist.ReduceOp.SUM))


def _most(number: float) -> float:
    return _reduced(number, dist.ReduceOp.MAX)


def _all(truth: bool) -> bool:
    return bool(_reduced(float(truth), dist.ReduceOp.MIN))
