"""What Megatron passes to attention about packed sequences, from the lengths of the segments."""

from __future__ import annotations

from itertools import accumulate

import torch
from megatron.core.packed_seq_params import PackedSeqParams


def packed(lengths: list[int]) -> PackedSeqParams:
    edges = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=edges,
        cu_seqlens_kv=edges,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
