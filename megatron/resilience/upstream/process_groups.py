"""Megatron's process groups for one seat of a plan, in its collection and in its global state.

Data-parallel groups hold this rank alone: upstream then divides nothing, reduces nothing and reads
every sample; what has to happen between replicas happens in sync domains. Some of upstream's code
does not take groups from the collection, so the global state is set to the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron.resilience.executor.groups import GroupPool
from megatron.resilience.executor.place import Seat
from megatron.resilience.executor.world import World


@dataclass(slots=True)
class Position:
    """Stands where upstream only asks a group for this rank's number and the size.

    Neither the pipeline that a micro-batch follows nor the set of replicas is a group of ranks in
    an uneven layout, and no collective may run over them. Changed in place when the
    layout changes, for modules keep it.
    """

    number: int
    count: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.count


def collection_for(seat: Seat, pool: GroupPool) -> ProcessGroupCollection:
    """Builds the collection that upstream's model and training loop take."""
    alone, tensor = pool[(seat.rank,)], pool[seat.members]
    return ProcessGroupCollection(
        tp=tensor,
        tp_cp=tensor,
        tp_ep=tensor,
        expt_tp=tensor,
        tp_dp_cp=tensor,
        pp=Position(seat.stage, seat.pipeline),
        # Where a replica keeps one copy of a checkpoint's shards, others keep further ones.
        dp_cp_gtp_remat=Position(seat.replica, seat.replicas + 1),
        **dict.fromkeys(_ALONE, alone),
    )


def reseat(groups: ProcessGroupCollection, seat: Seat, pool: GroupPool) -> None:
    """Changes a collection in place to that of another seat; modules that stay refer to it."""
    for name, value in vars(collection_for(seat, pool)).items():
        kept = getattr(groups, name)
        if isinstance(kept, Position):
            kept.number, kept.count = value.rank(), value.size()
        else:
            setattr(groups, name, value)


_ALONE = (
    *("cp", "ep", "dp", "dp_cp", "expt_dp", "expt_dp_gtp_remat", "intra_dp_cp", "intra_expt_dp"),
    # What upstream reduces over a replica, the executor has made the same on all ranks of all.
    *("mp", "tp_ep_pp", "tp_ep_pp_with_egtp_remat", "intra_dist_opt"),
)


def install(seat: Seat, groups: ProcessGroupCollection, world: World) -> None:
    """Sets Megatron's global state to the groups of the collection."""
    reset()
    for name, value in _globals(seat, groups, world).items():
        getattr(parallel_state, name)  # a name that upstream does not have is drift, not a fallback
        setattr(parallel_state, name, value)
    parallel_state._set_global_memory_buffer()


def reset() -> None:
    """Forgets the groups of an earlier plan; ending them is the pool's business."""
    for name in _ALL:
        setattr(parallel_state, name, None)


def _globals(seat: Seat, groups: ProcessGroupCollection, world: World) -> dict[str, Any]:
    # What upstream calls a global rank is torch's number.
    members, alone = world.numbers(seat.members), world.numbers((seat.rank,))
    return {
        "_TENSOR_MODEL_PARALLEL_GROUP": groups.tp,
        "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": members,
        "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": groups.tp,
        "_TENSOR_AND_DATA_PARALLEL_GROUP": groups.tp,
        "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": groups.tp,
        "_EXPERT_TENSOR_PARALLEL_GROUP": groups.tp,
        "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": groups.tp,
        "_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE": seat.tp,
        "_MPU_EXPERT_TENSOR_PARALLEL_RANK": seat.tp_rank,
        "_PIPELINE_MODEL_PARALLEL_GROUP": groups.pp,
        "_PIPELINE_GLOBAL_RANKS": alone,
        "_MPU_PIPELINE_MODEL_PARALLEL_RANK": seat.stage,
        "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": seat.pipeline,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE": seat.virtual,
        "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK": None if seat.virtual is None else 0,
        "_MODEL_PARALLEL_GROUP": groups.mp,
        "_MODEL_PARALLEL_GLOBAL_RANKS": alone,
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": groups.mp,
        "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP": groups.mp,
        "_DATA_PARALLEL_GROUP": groups.dp,
        "_DATA_PARALLEL_GROUP_WITH_CP": groups.dp,
        "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": groups.dp,
        "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT": groups.dp_cp_gtp_remat,
        "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": groups.dp,
        "_DATA_PARALLEL_GLOBAL_RANKS": alone,
        "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP": alone,
        "_CONTEXT_PARALLEL_GROUP": groups.cp,
        "_CONTEXT_PARALLEL_GLOBAL_RANKS": alone,
        "_EXPERT_MODEL_PARALLEL_GROUP": groups.ep,
        "_EXPERT_DATA_PARALLEL_GROUP": groups.dp,
        "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT": groups.dp,
        "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": groups.dp,
        "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": groups.mp,
    }


_ALL = (
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_PIPELINE_MODEL_PARALLEL_GROUP",
    "_EMBEDDING_GROUP",
    "_POSITION_EMBEDDING_GROUP",
    "_EMBEDDING_GLOBAL_RANKS",
    "_POSITION_EMBEDDING_GLOBAL_RANKS",
    "_GLOBAL_MEMORY_BUFFER",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
)
