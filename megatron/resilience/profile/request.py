"""What is asked of the ranks and what they answer; the modules that measure are imported there.

So that the process that asks needs no Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from resihp_ext.cost.model_shape import ModelShape

Mix = tuple[int, ...]
"""Segment lengths (tokens) of one micro-batch."""

PRELOAD = ("megatron.resilience.profile.preloaded",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What to measure."""

    shape: ModelShape
    batches: tuple[Mix, ...]
    """The first is the largest."""
    kind: Literal["cpu", "cuda"]
    backend: str
    budget_s: float
    """Time to spend on measuring after the warm-up, at least three rounds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds on one rank, of a layer by micro-batch; else by token or by parameter."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    head_forward_s: float
    head_backward_s: float
    embedding_s: float
    step_parameter_s: float
    rounds: int


def measure_model(request: Request) -> Times:
    """Runs in every rank of a tensor-parallel group of the size of the world."""
    from megatron.resilience.profile import bench

    return bench.measure_model(request)


def measure_link(request: Request, sizes_bytes: Sequence[int]) -> list[float]:
    """Runs in two ranks: seconds of a message of each size, one way."""
    from megatron.resilience.profile import bench

    return bench.measure_link(request, sizes_bytes)
