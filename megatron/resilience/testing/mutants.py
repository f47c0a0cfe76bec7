"""Deliberate errors in how plans are executed: each must be caught by the criteria of parity.

Each is a function that is called in a rank before the job is built (``run_trial``'s ``before``) and
puts a mistake in that somebody could make. What it replaces must be there, so that a mutant cannot
turn into a sound job unnoticed.
"""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor

from megatron.resilience.executor import manifest, runtime
from megatron.resilience.executor.buffers import MASTER, DomainBuffer
from megatron.resilience.executor.place import Seat
from megatron.resilience.executor.runtime import Step
from resihp_ext.environment import RankEnvironment
from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.plan import Device, Plan, Replica, Stage
from resihp_ext.plan.timetable import straight_routes


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Puts ``make(original)`` in the place of something that must be there."""
    setattr(owner, name, make(getattr(owner, name)))


def _each_tensor(change: Callable[[Any, ShardedTensor], None]) -> None:
    """Changes what the manifest says of the tensors of a model chunk."""

    def make(original: Any) -> Any:
        def changed(model: torch.nn.Module) -> Iterator[ShardedTensor]:
            for tensor in original(model):
                other = copy.copy(tensor)
                change(model, other)
                yield other

        return changed

    _replace(manifest, "logical_tensors", make)


def glu_as_one_block() -> None:
    """A rank's gate and up rows follow each other in the logical tensor, too."""

    def change(_model: Any, tensor: ShardedTensor) -> None:
        if "linear_fc1.weight" not in tensor.key or tensor.data is None:
            return
        axis, rows = len(tensor.global_shape) - tensor.data.ndim, tensor.data.shape[0]
        half, low = tensor.global_shape[axis] // 2, tensor.global_offset[axis]
        is_up, tp_rank = low >= half, low % half // rows
        offset = list(tensor.global_offset)
        offset[axis] = (2 * tp_rank + is_up) * rows
        tensor.global_offset = tuple(offset)

    _each_tensor(change)


def tied_embeddings_not_added() -> None:
    """The last stage keeps its output weight to itself."""

    def change(model: Any, tensor: ShardedTensor) -> None:
        if "word_embeddings" in tensor.key and not model.pre_process:
            tensor.key = "output_layer.weight"

    _each_tensor(change)


def norms_once_per_tp_rank() -> None:
    """What is replicated in a stage counts as often as it has ranks."""
    _replace(manifest, "_copies", lambda _original: lambda *_args: 1)


def partial_sums_averaged() -> None:
    """Norms under sequence parallelism are averaged over a stage instead of added."""

    def count(_name: str, parameter: torch.nn.Parameter, _config: object, tp: int) -> int:
        return 1 if getattr(parameter, "tensor_model_parallel", False) else tp

    _replace(manifest, "_copies", lambda _original: count)


def vocabulary_padded_per_degree() -> None:
    """Each degree pads the vocabulary to a multiple of its own."""
    words = ["--make-vocab-size-divisible-by", "128"]
    _replace(Seat, "flags", lambda original: lambda seat, given: [*original(seat, given), *words])


def micro_batch_dropped() -> None:
    """Micro-batch 5 of every step is not run anywhere."""

    def make(original: Any) -> Any:
        def run(step: Step, actions: Sequence[Action]) -> None:
            original(step, [action for action in actions if action.micro_batch != 5])

        return run

    _replace(Step, "run", make)


def replicas_averaged_equally() -> None:
    """Replicas weigh the same in the mean, however many micro-batches they run."""
    mine = 0

    def counted(original: Any) -> Any:
        def run(step: Step, actions: Sequence[Action]) -> None:
            nonlocal mine
            mine = sum(action.kind is Kind.FORWARD for action in actions)
            original(step, actions)

        return run

    def scaled(original: Any) -> Any:
        def forward_step(function: Any, data: Any, model: Any, _all: int, *a: Any, **k: Any) -> Any:
            return original(function, data, model, len(PLAN.replicas) * mine, *a, **k)

        return forward_step

    _replace(Step, "run", counted)
    _replace(runtime, "forward_step", scaled)


def norm_counts_every_owner() -> None:
    """The gradient norm counts an element as often as it has owners."""

    def square_sum(buffer: DomainBuffer) -> torch.Tensor:
        return torch.linalg.vector_norm(buffer.gradient, dtype=torch.float64) ** 2

    _replace(DomainBuffer, "square_sum", lambda _original: square_sum)


def one_owner_off_by_a_bit() -> None:
    """Rank 0 updates one weight that others own as well to the next larger number."""
    chosen: list[DomainBuffer] = []

    def make(original: Any) -> Any:
        def written(buffer: DomainBuffer) -> None:
            if (
                RankEnvironment.from_environ(os.environ).rank == 0
                and len(buffer.domain.owners) > 1
                and not chosen
            ):
                chosen.append(buffer)
            if buffer in chosen:
                _, weights = next(buffer.entries(MASTER))
                first = weights.view(-1)[:1]
                first.copy_(torch.nextafter(first, torch.full_like(first, math.inf)))
            original(buffer)

        return written

    _replace(DomainBuffer, "parameters_from_masters", make)


@dataclass(frozen=True, slots=True)
class Mutant:
    """A deliberate error, and what it takes to matter."""

    apply: Callable[[], None]
    flags: str = ""

    @property
    def name(self) -> str:
        return self.apply.__name__.replace("_", " ")


MUTANTS = (
    Mutant(glu_as_one_block),
    Mutant(norms_once_per_tp_rank),
    Mutant(tied_embeddings_not_added),
    Mutant(vocabulary_padded_per_degree),
    Mutant(micro_batch_dropped),
    Mutant(replicas_averaged_equally),
    Mutant(norm_counts_every_owner),
    Mutant(partial_sums_averaged, "--sequence-parallel"),
    Mutant(one_owner_off_by_a_bit),
)

FLAGS = "--no-untie-embeddings-and-output-weights"
"""Settings under which every mutant matters, in the plan below."""

_REPLICAS = (
    Replica(stages=(Stage(ranks=(0, 1), layers=(0, 3)), Stage(ranks=(2, 3), layers=(3, 4)))),
    Replica(stages=(Stage(ranks=(4,), layers=(0, 2)), Stage(ranks=(5, 6), layers=(2, 4)))),
)
PLAN = Plan(
    version=0,
    num_layers=4,
    devices=tuple(Device(rank=rank, node=0) for rank in range(7)),
    replicas=_REPLICAS,
    routes=straight_routes(_REPLICAS, (3, 5), 8),
).validated()
