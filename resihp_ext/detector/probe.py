"""What is measured to validate a suspect: micro-benchmarks, as they are asked for and answered.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

MOST_RANKS = 64
"""Of a task."""
MOST_TASKS = 16
"""Of a probe."""
MOST_SAMPLES = 64
"""Of a task, on a rank."""

_Rank = Annotated[int, Meta(ge=0, lt=2**20)]


class TaskKind(StrEnum):
    """What is run."""

    GEMM = "gemm"
    """Matrix products, on every rank for itself."""
    P2P = "p2p"
    """A message there and back; the first of two ranks measures half of that."""
    ALL_REDUCE = "all_reduce"
    """A small ring of messages over all ranks; each measures it."""


class Task(msgspec.Struct, frozen=True, array_like=True):
    """One micro-benchmark. All who take part do their tasks in the order of the probe."""

    kind: TaskKind
    ranks: Annotated[tuple[_Rank, ...], Meta(min_length=1, max_length=MOST_RANKS)]

    def __post_init__(self) -> None:
        count = len(self.ranks)
        fits = {TaskKind.P2P: count == 2, TaskKind.ALL_REDUCE: count > 1}.get(self.kind, True)
        if not fits or len(set(self.ranks)) != count:
            raise ValueError(f"task {self.kind} of ranks {self.ranks}: not acceptable")


class Measured(msgspec.Struct, frozen=True, array_like=True):
    """What one rank has measured in one task."""

    task: Annotated[int, Meta(ge=0, lt=MOST_TASKS)]
    """Its place in the probe."""
    seconds: Annotated[tuple[float, ...], Meta(max_length=MOST_SAMPLES)]
    """Of every repetition."""
