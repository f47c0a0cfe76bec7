"""Initial weights as a function of (seed, logical tensor, element), whatever the layout.

Megatron draws a rank's weights from a generator seeded by the rank's place, so two layouts start
from two models. Here every element of a logical tensor has its own random number, computed from its
global index: a rank computes just its slice, and any rank of any layout computes the same one.

The numbers are SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
OOPSLA 2014) of key and index, turned into normals by Box-Muller in float64; rounding to the
parameter's type afterwards hides the last-bit freedom of vectorised ``log`` and ``cos``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from resihp_ext.errors import UserError

_CHUNK = 1 << 22
"""Elements drawn at a time: bounds the float64 scratch to 100 MB or so."""


def logical_tensors(model: torch.nn.Module) -> Iterator[ShardedTensor]:
    """Yields the slices of logical tensors that a model chunk holds, as checkpoints name them.

    The ``data`` of each is the parameter itself or a view of it (GLU weights are two slices).
    """
    state: dict[str, Any] = model.sharded_state_dict()
    apply_factories(state)
    yield from (item for item in nested_values(state) if isinstance(item, ShardedTensor))


def tensor_key(seed: int, name: str) -> int:
    """64-bit key of one logical tensor, as a signed integer."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def normals(key: int, index: torch.Tensor) -> torch.Tensor:
    """Standard normal numbers (float64) of the elements ``index`` (int64) of one tensor."""
    radius = torch.sqrt(-2.0 * torch.log1p(-_uniform(key, 2 * index)))
    return radius * torch.cos(2.0 * math.pi * _uniform(key, 2 * index + 1))


def _uniform(key: int, counter: torch.Tensor) -> torch.Tensor:
    """Numbers in [0, 1) of 53 random bits, by SplitMix64's finaliser."""
    bits = key + (counter + 1) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
    return _shift(bits ^ _shift(bits, 31), 11).double() * 2.0**-53


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift; torch's ``>>`` copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def fill(tensor: ShardedTensor, *, seed: int, std: float) -> None:
    """Writes the slice's elements of ``N(0, std)`` into its data, chunk by chunk."""
    key = tensor_key(seed, tensor.key)
    target = tensor.data
    strides = _row_major_strides(tensor.global_shape)
    lead = len(tensor.global_shape) - target.ndim
    base = sum(o * s for o, s in zip(tensor.global_offset, strides, strict=True))
    flat_rows = target.reshape(-1, target.shape[-1])
    rows = _row_offsets(target.shape[:-1], strides[lead:-1], target.device)
    columns = torch.arange(target.shape[-1], device=target.device)
    step = max(1, _CHUNK // target.shape[-1])
    values = torch.empty_like(flat_rows)
    for first in range(0, len(rows), step):
        index = base + rows[first : first + step, None] + columns
        values[first : first + step] = (normals(key, index) * std).to(target.dtype)
    target.copy_(values.view(target.shape))


def _row_major_strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _row_offsets(shape: torch.Size, strides: list[int], device: torch.device) -> torch.Tensor:
    """Global index, relative to the slice's first element, of the start of each of its rows."""
    offsets = torch.zeros(1, dtype=torch.int64, device=device)
    for size, stride in zip(shape, strides, strict=True):
        axis = torch.arange(size, device=device) * stride
        offsets = (offsets[:, None] + axis).reshape(-1)
    return offsets


def standard_deviation(name: str, config: Any) -> float:
    """The deviation that Megatron's config gives the weight ``name``.

    Raises:
        UserError: an initialisation that is not a normal distribution.
    """
    if "embedding" in name:
        method = config.embedding_init_method
    elif ".linear_proj." in name or ".linear_fc2." in name:
        method = config.output_layer_init_method
    else:
        method = config.init_method
    if getattr(method, "func", None) is not torch.nn.init.normal_:
        raise UserError(
            f"initial weights of {name}: only normal initialisation is independent of the layout; "
            "remove --init-method-xavier-uniform or give --initial-weights upstream"
        )
    return float(method.keywords["std"])


@torch.no_grad()
def initialise(
    models: list[torch.nn.Module], *, seed: int, config: Any = None
) -> list[torch.nn.Module]:
    """Pre-wrap hook: redraws every random weight; constants (norms, biases) stay as they are.

    Args:
        config: Knows the deviations; default: each model's own.
    """
    for model in models:
        for tensor in logical_tensors(model):
            # Norm scales and biases start constant in every layout; matrices are what is drawn.
            if tensor.data is not None and tensor.data.ndim > 1:
                std = standard_deviation(tensor.key, config or model.config)
                fill(tensor, seed=seed, std=std)
    return models
