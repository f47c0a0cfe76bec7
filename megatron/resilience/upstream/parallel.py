"""This rank's place in Megatron's parallel state, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where one model chunk of this rank stands."""

    tp_rank: int
    stage: int
    stages: int
    replica: int
    first: bool
    """Holds the embedding."""
    last: bool
    """Holds the loss."""


def place(vp_stage: int | None = None) -> Place:
    """Place of this rank; ``vp_stage`` is the model chunk under virtual pipelining."""
    return Place(
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        stage=parallel_state.get_pipeline_model_parallel_rank(),
        stages=parallel_state.get_pipeline_model_parallel_world_size(),
        replica=parallel_state.get_data_parallel_rank(),
        first=parallel_state.is_pipeline_first_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
        last=parallel_state.is_pipeline_last_stage(
            ignore_virtual=vp_stage is None, vp_stage=vp_stage
        ),
    )


def tensor_group() -> tuple[Any, int]:
    """The tensor-parallel group and the global rank of its first member."""
    return (
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_tensor_model_parallel_src_rank(),
    )


def context_group() -> Any:
    """The context-parallel group."""
    return parallel_state.get_context_parallel_group()


def parallel_sizes() -> dict[str, int]:
    """Degrees of the uniform layout that Megatron was started with."""
    return {
        "tp": parallel_state.get_tensor_model_parallel_world_size(),
        "pp": parallel_state.get_pipeline_model_parallel_world_size(),
        "dp": parallel_state.get_data_parallel_world_size(),
    }
