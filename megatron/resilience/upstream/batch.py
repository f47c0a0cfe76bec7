"""One micro-batch, as every rank of a stage needs it: read once, broadcast by upstream's code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training.training import update_seqlen_stats_from_cu_seqlens

from megatron.resilience.upstream import parallel
from megatron.resilience.upstream.arguments import current_args


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Tensors of shape ``(micro_batch_size, seq_length)``, or ``(1, tokens)`` when packed.

    What the stage does not need is None: labels and mask before the last, tokens after the first.
    """

    tokens: torch.Tensor | None
    labels: torch.Tensor | None
    loss_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    packed: PackedSeqParams | None

    @property
    def segments(self) -> list[int] | None:
        """Lengths (tokens) of the packed documents, padding included; None when not packed."""
        return None if self.bounds is None else self.bounds.diff().tolist()

    @property
    def bounds(self) -> torch.Tensor | None:
        """Where packed documents begin and end (tokens); None when not packed."""
        return None if self.packed is None else self.packed.cu_seqlens_q

    @property
    def is_read(self) -> bool:
        """Whether this rank has seen anything of it."""
        return any(one is not None for one in (self.tokens, self.labels, self.packed))


def is_packed() -> bool:
    """Whether samples carry document boundaries."""
    return bool(current_args().dataloader_inter_document_masking)


def reads_data(vp_stage: int | None = None) -> bool:
    """Whether this rank needs a data loader: packed boundaries are needed on every stage."""
    here = parallel.place(vp_stage)
    return here.tp_rank == 0 and (here.first or here.last or is_packed())


def next_micro_batch(
    data_iterator: Iterator[dict[str, Any]] | None, device: torch.device, vp_stage: int | None
) -> MicroBatch:
    """Reads the next micro-batch; collective over the tensor-parallel group.

    Args:
        data_iterator: Upstream's iterator; used on tensor-parallel rank 0 only.
        device: Where the tensors go.
    """
    here = parallel.place(vp_stage)
    if not (here.first or here.last or is_packed()):
        return _micro_batch({})
    batch: dict[str, Any] = {}
    if here.tp_rank == 0:
        assert data_iterator is not None, "tensor-parallel rank 0 has no data loader"
        batch = {
            key: value.to(device, non_blocking=True) for key, value in next(data_iterator).items()
        }
    return _micro_batch(_share(batch, here))


def _share(batch: dict[str, Any], here: parallel.Place) -> dict[str, Any]:
    """Upstream's broadcast over TP, flattening of packed samples, slicing over CP."""
    args = current_args()
    group, source = parallel.tensor_group()
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=is_packed(),
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=source,
        broadcast_group=group,
        cp_size=args.context_parallel_size,
        tp_rank=here.tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=here.stages,
        is_pipeline_first_stage=here.first,
        is_pipeline_last_stage=here.last,
    )
    batch = flatten_batch_for_packed_sequences(batch)
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel.context_group())


def _micro_batch(batch: dict[str, Any]) -> MicroBatch:
    packed = None
    bounds = batch.get("cu_seqlens")
    if bounds is not None:
        packed = _packed_parameters(bounds[0], int(batch["max_seqlen"][0]))
        update_seqlen_stats_from_cu_seqlens(packed.cu_seqlens_q)
    names = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
    return MicroBatch(packed=packed, **{name: batch.get(name) for name in names})


def _packed_parameters(cu_seqlens: torch.Tensor, longest: int) -> PackedSeqParams:
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
