"""A trial: a short real job, run through the same code as ``pretrain_gpt.py``, and what it gave.

Layouts are compared by three things, since a loss alone hides wrong gradient scales: losses and
gradient norms of every step, and the logical weights after the last.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from resihp_ext.events import read_events
from resihp_ext.testing.ranks import preload, run_ranks

PRELOAD = ("megatron.resilience.testing.preloaded",)

Weights = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What one job gave."""

    losses: list[float]
    """Mean loss of the global batch, per step."""
    grad_norms: list[float]
    """Gradient norm before clipping, per step."""
    weights: Weights
    """Logical tensors after the last step, by name."""
    events: list[dict[str, Any]] = field(repr=False)


def run_trial(
    argv: Sequence[str],
    *,
    world_size: int = 1,
    timeout_s: float = 240.0,
    environment: Mapping[str, str] | None = None,
) -> Trial:
    """Trains with ``argv`` (presets allowed) on ``world_size`` fresh processes.

    Raises:
        RankError: a rank raised, died or took longer than ``timeout_s`` seconds.
    """
    preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        words = [*argv, "--resilience", "--resilience-dir", folder]
        pieces = run_ranks(world_size, train, words, timeout_s=timeout_s, environment=environment)
        events = read_events(Path(folder) / "events.jsonl")
    steps = [event for event in events if event["event"] == "iteration"]
    return Trial(
        losses=[event["losses"]["lm loss"] for event in steps],
        grad_norms=[event["grad_norm"] for event in steps],
        weights=assemble(pieces),
        events=events,
    )


def train(argv: Sequence[str]) -> list[Any]:
    """Runs in a rank: trains, and returns this rank's main slices of the logical weights."""
    torch.set_num_threads(1)
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megatron.resilience.job import Job
    from megatron.resilience.start import command_line

    slices: list[Any] = []
    # Upstream ends a job at --exit-interval with SystemExit(0).
    with suppress(SystemExit), Job(command_line(argv)) as job:
        job.on_trained = lambda: slices.extend(main_slices(job.models))
        pretrain(
            job.config,
            job.datasets,
            ModelType.encoder_or_decoder,
            job.forward_step,
            **job.options,
        )
    return slices


def main_slices(models: Sequence[torch.nn.Module]) -> list[Any]:
    """``(name, global shape, global offset, values)`` of what this rank owns as first replica."""
    from megatron.core.utils import unwrap_model

    from megatron.resilience.model.initial_weights import logical_tensors

    slices = []
    for model in models:
        for tensor in logical_tensors(unwrap_model(model)):
            replica = tensor.replica_id
            first = not any(replica) if isinstance(replica, tuple) else replica == 0
            if first and tensor.data is not None:
                values = tensor.data.detach().float().cpu().numpy().copy()
                slices.append((tensor.key, tensor.global_shape, tensor.global_offset, values))
    return slices


def assemble(pieces: Sequence[Sequence[Any]]) -> Weights:
    """Puts the slices of all ranks together; every element must be there exactly once.

    Raises:
        ValueError: a tensor has holes or overlaps.
    """
    weights: Weights = {}
    filled: dict[str, int] = {}
    for name, shape, offset, values in (piece for rank in pieces for piece in rank):
        whole = weights.setdefault(name, np.full(shape, np.nan, dtype=np.float32))
        lead = len(shape) - values.ndim
        place = tuple(offset[:lead]) + tuple(
            slice(start, start + size)
            for start, size in zip(offset[lead:], values.shape, strict=True)
        )
        whole[place] = values
        filled[name] = filled.get(name, 0) + values.size
    wrong = [name for name, whole in weights.items() if filled[name] != math.prod(whole.shape)]
    if wrong:
        raise ValueError(f"slices of {wrong} do not cover the tensor exactly once")
    return weights


def max_rel_diff(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference of two equally long series.

    Raises:
        ValueError: different lengths, or nothing to compare.
    """
    if len(found) != len(expected) or not expected:
        raise ValueError(f"cannot compare {len(found)} steps with {len(expected)}")
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def max_weight_diff(found: Weights, expected: Weights) -> float:
    """Largest absolute difference of any logical element.

    Raises:
        ValueError: the two do not hold the same tensors.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"different tensors: {sorted(found.keys() ^ expected.keys())}")
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)
