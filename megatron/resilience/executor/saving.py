"""Saves of checkpoints: one that fails costs a checkpoint, not the job.

A full disk shows itself on all ranks at once, where Megatron gathers what was written, or on one
rank alone, while the others wait for it: then all break off together, and agree that there is
nothing to save. What is half written has no marker of a finished save and is never loaded.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException

from megatron.resilience.checkpoint.choose import REMOTE_PREFIX
from megatron.resilience.executor.guard import Figures, Guard, SpoiledError

_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"
_PROBE_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedSave:
    """The latest save, if it failed."""

    step: int
    cause: str
    """Empty on ranks that do not know."""


class Saving:
    """Runs upstream's saves on this rank.

    Attributes:
        failed: The latest save, if it failed.
    """

    def __init__(self, device: torch.device) -> None:
        """Prepares saves.

        Args:
            device: Where tensors live that the backend moves.
        """
        self._device = device
        self.failed: FailedSave | None = None
        self._cause = ""

    def run(self, guard: Guard, save: Callable[[], None], *, step: int, directory: str) -> bool:
        """Saves, or says in one line why that was not possible; collective.

        Args:
            save: Saves; collective. Called again after a change of layout.
            step: Whose checkpoint it is.
            directory: ``--save``.

        Returns:
            Whether it is there.
        """
        self._cause = ""
        (failed,) = guard.run("checkpoint", lambda: self._attempt(save, step, directory))
        self.failed = FailedSave(step=step, cause=self._cause) if failed else None
        if failed and self._cause:
            print(  # noqa: T201 - a line for people
                f"resihp: step {step}: the checkpoint could not be saved: {self._cause}; "
                "it is tried again when the next one is due",
                flush=True,
            )
        return not failed

    def _attempt(self, save: Callable[[], None], step: int, directory: str) -> Figures:
        if not self._cause and dist.get_rank() == 0:
            self._cause = why_not_writable(directory)
        if self._anybody(bool(self._cause)):
            return (1.0,)
        forget_results()
        try:
            save()
        except CheckpointException as error:
            # Raised by all ranks together; the details are known to the first one.
            self._cause = why_failed(error)
            return (1.0,)
        except (ConnectionError, TimeoutError):
            raise
        except OSError as error:
            self._cause = why_failed(error)
            raise SpoiledError(f"checkpoint of step {step}: {self._cause}") from error
        return (0.0,)

    def _anybody(self, mine: bool) -> bool:
        """Whether any rank knows that the save is in vain; collective."""
        flag = torch.tensor([float(mine)], device=self._device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def why_not_writable(directory: str) -> str:
    """What keeps a small file from being written there; empty if nothing does."""
    if directory.startswith(REMOTE_PREFIX):
        return ""
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        return f"{directory}: {error.strerror or error}"
    return ""


def forget_results() -> None:
    """Drops what an attempt that was broken off has written: upstream would take it for its own."""
    queue: Any = importlib.import_module(_WRITER)._results_queue
    while queue is not None and not queue.empty():
        queue.get_nowait()


def why_failed(error: BaseException) -> str:
    """The reason of a failed save in one line; empty where only another rank knows it."""
    if isinstance(error, CheckpointException):
        for rank, (failure, _trace) in sorted(error.failures.items()):
            return f"rank {rank}: {why_failed(failure)}"
        return ""
    return " ".join(str(error).split())[:500]
