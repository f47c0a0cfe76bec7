"""A trial: a short real job, run through the same code as ``pretrain_gpt.py``, and what it gave.

Layouts are compared by three things, since a loss alone hides wrong gradient scales: losses and
gradient norms of every step, and the logical weights after the last.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
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
class Slice:
    """What one rank holds of a logical tensor."""

    tensor: str
    shape: tuple[int, ...]
    """Of the logical tensor."""
    offset: tuple[int, ...]
    """Of the slice's first element in it."""
    values: np.ndarray
    """fp32; may lack leading axes of the tensor, along which it has one element."""
    main: bool
    """Whether this rank is the first of all that hold these elements."""

    @property
    def place(self) -> tuple[int | slice, ...]:
        """Where the values lie in an array of the logical tensor."""
        lead = len(self.shape) - self.values.ndim
        ranges = zip(self.offset[lead:], self.values.shape, strict=True)
        return *self.offset[:lead], *(slice(start, start + size) for start, size in ranges)


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What one job gave."""

    losses: list[float]
    """Mean loss of the global batch, per step."""
    grad_norms: list[float]
    """Gradient norm before clipping, per step."""
    weights: Weights
    """Logical tensors after the last step, by name."""
    disagreements: int
    """How often an owner of an element holds other bits than the element's first owner."""
    events: list[dict[str, Any]] = field(repr=False)


def run_trial(
    argv: Sequence[str],
    *,
    world_size: int = 1,
    timeout_s: float = 240.0,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
) -> Trial:
    """Trains with ``argv`` (presets allowed) on ``world_size`` fresh processes.

    Without a plan schedule the job runs in Megatron's own layout, by its own schedules: what plans
    are compared with.

    Args:
        before: Called in every rank before the job is built; an importable function, one that puts
            in a deliberate error say.

    Raises:
        RankError: a rank raised, died or took longer than ``timeout_s`` seconds.
    """
    preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        words = [*argv, "--resilience", "--resilience-dir", folder, *_observing(argv)]
        pieces = run_ranks(
            world_size, train, words, before, timeout_s=timeout_s, environment=environment
        )
        events = read_events(Path(folder) / "events.jsonl")
    weights = assemble(pieces)
    steps = [event for event in events if event["event"] == "iteration"]
    return Trial(
        losses=[event["losses"]["lm loss"] for event in steps],
        grad_norms=[event["grad_norm"] for event in steps],
        weights=weights,
        disagreements=disagreements(pieces, weights),
        events=events,
    )


def _observing(argv: Sequence[str]) -> list[str]:
    """The flag that leaves a job without plans to Megatron's own schedules."""
    return [] if "--resilience-plan-schedule" in argv else ["--resilience-observe-only"]


def train(argv: Sequence[str], before: Callable[[], None] | None = None) -> list[Slice]:
    """Runs in a rank: trains, and returns what this rank holds of the logical weights."""
    torch.set_num_threads(1)
    from megatron.core.enums import ModelType
    from megatron.training import pretrain

    from megatron.resilience.job import Job
    from megatron.resilience.start import command_line

    if before is not None:
        before()
    slices: list[Slice] = []
    # Upstream ends a job at --exit-interval with SystemExit(0).
    with suppress(SystemExit), Job(command_line(argv)) as job:
        job.on_trained = lambda: slices.extend(slices_of(job.models))
        pretrain(
            job.config,
            job.datasets,
            ModelType.encoder_or_decoder,
            job.forward_step,
            **job.options,
        )
    return slices


def slices_of(models: Sequence[torch.nn.Module]) -> Iterator[Slice]:
    """Everything that the model chunks of a rank hold."""
    from megatron.core.utils import unwrap_model

    from megatron.resilience.model.initial_weights import logical_tensors

    for model in models:
        for tensor in logical_tensors(unwrap_model(model)):
            if tensor.data is None:
                continue
            replica = tensor.replica_id
            yield Slice(
                tensor=tensor.key,
                shape=tuple(tensor.global_shape),
                offset=tuple(tensor.global_offset),
                values=tensor.data.detach().float().cpu().numpy().copy(),
                main=not any(replica) if isinstance(replica, tuple) else replica == 0,
            )


def assemble(pieces: Sequence[Sequence[Slice]]) -> Weights:
    """Puts the main slices of all ranks together; every element must be there exactly once.

    Raises:
        ValueError: a tensor has holes or overlaps, or ranks differ about its shape.
    """
    weights: Weights = {}
    filled: dict[str, int] = {}
    for one in (piece for rank in pieces for piece in rank if piece.main):
        whole = weights.setdefault(one.tensor, np.full(one.shape, np.nan, dtype=np.float32))
        if whole.shape != one.shape:
            raise ValueError(f"{one.tensor}: some ranks say {whole.shape}, others {one.shape}")
        whole[one.place] = one.values
        filled[one.tensor] = filled.get(one.tensor, 0) + one.values.size
    wrong = [name for name, whole in weights.items() if filled[name] != math.prod(whole.shape)]
    if wrong:
        raise ValueError(f"slices of {wrong} do not cover the tensor exactly once")
    return weights


def disagreements(pieces: Sequence[Sequence[Slice]], weights: Weights) -> int:
    """Counts values of any owner whose bits are not those of the assembled weights."""
    return sum(
        int((one.values.view(np.int32) != weights[one.tensor][one.place].view(np.int32)).sum())
        for rank in pieces
        for one in rank
    )


def max_rel_diff(found: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference of two equally long series; infinity where there is NaN.

    Raises:
        ValueError: different lengths, or nothing to compare.
    """
    if len(found) != len(expected) or not expected:
        raise ValueError(f"cannot compare {len(found)} steps with {len(expected)}")
    return _largest([abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True)])


def max_weight_diff(found: Weights, expected: Weights) -> float:
    """Largest absolute difference of any logical element; infinity where there is NaN.

    Raises:
        ValueError: the two do not hold the same tensors.
    """
    if found.keys() != expected.keys():
        raise ValueError(f"different tensors: {sorted(found.keys() ^ expected.keys())}")
    for name, whole in found.items():
        if whole.shape != expected[name].shape:
            raise ValueError(f"{name}: shape {whole.shape} instead of {expected[name].shape}")
    return _largest([float(np.abs(found[name] - expected[name]).max()) for name in expected])


def _largest(values: Sequence[float]) -> float:
    # Python's max passes over NaN, here and wherever the result goes.
    return math.inf if any(map(math.isnan, values)) else max(values)
