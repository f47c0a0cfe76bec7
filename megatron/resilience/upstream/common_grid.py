"""Checkpoints of stages with different tensor-parallel degrees, in Megatron's own format.

The format wants every shard of a tensor to have the same shape. Where degrees differ, each rank
offers its part in as many pieces as make all ranks' pieces equal: a grid of the least common
multiple of the degrees, which divides whatever each of them divides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedTensor,
    ShardedTensorFactory,
)


def refine(model: torch.nn.Module, pieces: int) -> None:
    """Makes a model chunk offer its tensor-parallel shards in ``pieces`` pieces each.

    A later call replaces the effect of an earlier one.
    """

    def sharded_state_dict(*args: Any, **kwargs: Any) -> Any:
        state = type(model).sharded_state_dict(model, *args, **kwargs)  # type: ignore[attr-defined]
        dict_list_map_inplace(lambda entry: _refined(entry, pieces), state)
        return state

    # On the instance, which hides the method of its class.
    vars(model).pop("sharded_state_dict", None)
    if pieces > 1:
        vars(model)["sharded_state_dict"] = sharded_state_dict


def hold_nothing(model: torch.nn.Module) -> None:
    """Lets upstream save and load a model chunk without parameters, which it takes for missing."""

    def load_state_dict(*_args: Any, **_kwargs: Any) -> None:
        return None

    vars(model)["sharded_state_dict"] = lambda *_, **__: {"empty": LocalNonpersistentObject(True)}
    vars(model)["load_state_dict"] = load_state_dict


def _refined(entry: Any, pieces: int) -> Any:
    if not isinstance(entry, ShardedTensor | ShardedTensorFactory):
        return entry
    axis = _parallel_axis(entry.data)
    if axis is None:
        return entry
    if isinstance(entry, ShardedTensorFactory):
        return _factory(entry, entry.build_fn, entry.merge_fn, axis, pieces)
    template = entry.without_data()

    def build(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[Any]:
        tensor = replace(template, key=key, data=data, dtype=data.dtype, replica_id=replica_id)
        return [replace(tensor, flattened_range=flattened_range)]

    return _factory(entry, build, lambda parts: parts[0], axis, pieces)


def _factory(entry: Any, build: Any, merge: Any, axis: int, pieces: int) -> ShardedTensorFactory:
    """A factory that cuts what ``build`` gives, and joins it before ``merge``."""

    def build_pieces(key: str, data: Any, replica_id: Any, flattened_range: Any) -> list[Any]:
        built = build(key, data, replica_id, flattened_range)
        return [_cut(tensor, axis, pieces) for tensor in built]

    def merge_pieces(loaded: Sequence[Sequence[torch.Tensor]]) -> Any:
        return merge([torch.cat(list(parts), dim=axis) for parts in loaded])

    return ShardedTensorFactory(entry.key, entry.data, build_pieces, merge_pieces, entry.replica_id)


def _cut(tensor: ShardedTensor, axis: int, pieces: int) -> list[ShardedTensor]:
    global_axis = axis + tensor.prepend_axis_num
    size = tensor.local_shape[axis] // pieces
    shape = _with(tensor.local_shape, axis, size)
    assert tensor.axis_fragmentations is not None, "the grid that is refined is a regular one"
    cells = _with(
        tensor.axis_fragmentations, global_axis, tensor.axis_fragmentations[global_axis] * pieces
    )
    return [
        replace(
            tensor,
            data=None if tensor.data is None else tensor.data.narrow(axis, k * size, size),
            local_shape=shape,
            global_offset=_with(
                tensor.global_offset, global_axis, tensor.global_offset[global_axis] + k * size
            ),
            axis_fragmentations=cells,
        )
        for k in range(pieces)
    ]


def _with(values: Sequence[int], axis: int, value: int) -> tuple[int, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _parallel_axis(data: Any) -> int | None:
    """The axis on which tensor parallelism cuts a parameter."""
    if not getattr(data, "tensor_model_parallel", False):
        return None
    return int(data.partition_dim)
