"""The memory model against Megatron's own modules: parameters exactly, activations roughly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import distributed

from megatron.resilience.patches.registry import PatchSet
from megatron.resilience.profile.model import build, packed
from resihp_ext.cost.memory import MemoryPolicy, stage_memory
from resihp_ext.cost.model_shape import MODELS, ModelShape

pytestmark = pytest.mark.unit

TINY = MODELS["tiny"]
CPU = torch.device("cpu")
POLICY = MemoryPolicy(param_bytes=4, master_bytes=0, fused=False)

ACTIVATION_TOLERANCE = 0.005
"""Measured: 0.11 % more than the model says, for the scale factors of norms and the loss mask."""


@pytest.fixture(scope="module", autouse=True)
def single_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    patches = PatchSet()
    patches.apply_for("cpu")
    yield
    patches.undo_all()
    distributed.destroy_process_group()


def real_model(shape: ModelShape) -> torch.nn.Module:
    world = distributed.group.WORLD
    return build(shape, group=world, alone=world, device=CPU, dtype=torch.float32)


def saved_bytes(model: torch.nn.Module, lengths: list[int]) -> int:
    """Bytes of storage that autograd keeps of one forward, parameters left out."""
    ignored = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(1, sum(lengths), dtype=torch.int64)
    positions = torch.arange(sum(lengths))[None]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(tokens, positions, None, labels=tokens, packed_seq_params=packed(lengths, CPU))
    assert loss.requires_grad
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in ignored)


@pytest.mark.parametrize(
    "shape",
    [
        TINY,
        replace(TINY, gated=False, query_groups=8, num_layers=2),
        replace(TINY, qkv_bias=True, num_layers=1),
        replace(TINY, tied=True, num_layers=1),
    ],
    ids=["tiny", "no gate, no groups", "biases", "tied"],
)
def test_parameters_are_the_real_ones(shape: ModelShape) -> None:
    real = sum(parameter.numel() for parameter in real_model(shape).parameters())
    stage = stage_memory(shape, POLICY, depth=shape.num_layers, tp=1, first=True, last=True)
    assert real == shape.parameters
    assert real * 4 == stage.parameters


@pytest.mark.parametrize("lengths", [[1024], [256] * 4, [1, 600, 423]], ids=str)
def test_activations_are_nearly_the_real_ones(lengths: list[int]) -> None:
    real = saved_bytes(real_model(TINY), lengths)
    stage = stage_memory(TINY, POLICY, depth=TINY.num_layers, tp=1, first=True, last=True)
    assert stage.activations == pytest.approx(real, rel=ACTIVATION_TOLERANCE)


def test_activations_without_a_gate() -> None:
    shape = replace(TINY, gated=False, query_groups=8, num_layers=2)
    stage = stage_memory(shape, POLICY, depth=2, tp=1, first=True, last=True)
    real = saved_bytes(real_model(shape), [1024])
    assert stage.activations == pytest.approx(real, rel=ACTIVATION_TOLERANCE)
