"""Optimizer state in checkpoints: as Megatron's own optimizers write it, whatever the layout.

The flat state of the domains is put together into tensors shaped like the parameters, which
Megatron's checkpoints know how to name, cut and load under any layout. A checkpoint of one can be
resumed by the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)

from megatron.resilience.executor.buffers import MASTER
from megatron.resilience.executor.parts import parts
from resihp_ext.errors import CheckpointError

if TYPE_CHECKING:
    from megatron.resilience.executor.optimizer import DomainOptimizer

_MASTER_KEY = "fp32_param"


def sharded(optimizer: DomainOptimizer, model_state: Any, loading: bool) -> dict[str, Any]:
    """State as Megatron's checkpoints take it; collective where owners share the state.

    Args:
        model_state: The modules' sharded state.
        loading: Whether the tensors are there to be filled.
    """
    parameters = list(chain.from_iterable(optimizer.parameters))
    names = get_param_id_to_sharded_param_map(model_state, parameters)
    state: dict[Any, Any] = {number: {} for number in range(len(parameters))}
    masters: dict[int, Any] = {}
    for kind, tensors in _by_parameter(optimizer, parameters, fill=not loading):
        for number, tensor in enumerate(tensors):
            key = _MASTER_KEY if kind == MASTER else kind
            entry = make_sharded_optimizer_tensor(
                names[number], tensor, prefix=f"optimizer.state.{key}"
            )
            if kind == MASTER:
                masters[number] = entry
            else:
                state[number][kind] = entry
    plain = optimizer.state_dict()
    state["common_step"] = torch.tensor(float(plain["state"]["common_step"]))
    for group in plain["param_groups"]:
        group["params"] = LocalNonpersistentObject(group["params"])
    inner = {"state": state, "param_groups": plain["param_groups"]}
    if not optimizer.config.bf16:
        return inner
    groups = [[masters[k] for k in group["params"].obj] for group in plain["param_groups"]]
    return {"optimizer": inner, "fp32_from_fp16_params": groups}


def load(optimizer: DomainOptimizer, found: dict[str, Any]) -> bool:
    """Takes what :func:`sharded` asked for and a checkpoint has filled.

    Returns:
        Whether there were masters in it.

    Raises:
        CheckpointError: the state of another kind of optimizer.
    """
    inner = found.get("optimizer", found)
    state = inner["state"]
    parameters = list(chain.from_iterable(optimizer.parameters))
    loaded = {
        kind: [state[number][kind] for number in range(len(parameters))]
        for kind in _kinds(optimizer)
        if kind != MASTER
    }
    if "fp32_from_fp16_params" in found:
        loaded[MASTER] = list(chain.from_iterable(found["fp32_from_fp16_params"]))
    numbers = {id(parameter): k for k, parameter in enumerate(parameters)}
    for buffer in optimizer.buffers:
        for kind, tensors in loaded.items():
            for part in parts(
                buffer.state[kind],
                buffer.kept,
                optimizer.pieces,
                lambda piece, tensors=tensors: tensors[numbers[id(piece.parameter)]],  # type: ignore[misc]
            ):
                part.flat.copy_(part.local)
    if "common_step" not in state:
        raise CheckpointError("the checkpoint's optimizer state has no step")
    optimizer.set_steps(int(state["common_step"]))
    _load_groups(optimizer, inner["param_groups"])
    return MASTER in loaded


def _load_groups(optimizer: DomainOptimizer, saved: list[dict[str, Any]]) -> None:
    """Takes the groups' hyperparameters; their tensors stay."""
    paired = optimizer._filter_and_reorder_param_groups(
        optimizer.param_groups, [dict(group) for group in saved]
    )
    for mine, theirs in zip(optimizer.param_groups, paired, strict=True):
        mine.update({key: value for key, value in theirs.items() if key != "params"})


def _kinds(optimizer: DomainOptimizer) -> tuple[str, ...]:
    """Kinds of state that a checkpoint holds: masters only where the weights are not fp32."""
    from megatron.resilience.executor.optimizer import kinds_of

    return (*((MASTER,) if optimizer.config.bf16 else ()), *kinds_of(optimizer.config))


def _by_parameter(
    optimizer: DomainOptimizer, parameters: list[torch.nn.Parameter], *, fill: bool
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """For each kind, fp32 tensors in the shapes of the parameters."""
    numbers = {id(parameter): k for k, parameter in enumerate(parameters)}
    for kind in _kinds(optimizer):
        tensors = [torch.zeros_like(one, dtype=torch.float32) for one in parameters]
        for buffer in optimizer.buffers if fill else ():
            flat = buffer.gathered(kind, torch.float32)
            for part in parts(
                flat,
                buffer.domain.slabs,
                optimizer.pieces,
                lambda piece, tensors=tensors: tensors[numbers[id(piece.parameter)]],  # type: ignore[misc]
            ):
                part.local.copy_(part.flat)
        yield kind, tensors
