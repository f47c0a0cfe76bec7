"""Core attention over packed documents: causal inside a document, nothing across.

The cost is ``beta * sum(l_i ** 2)`` over the segment lengths ``l_i``, never ``beta * N ** 2``: the
work is done segment by segment, not under a mask. On a CPU, and for fp32 on a GPU, each segment is
one call of torch's scaled dot-product attention; for half precision on a GPU torch's
variable-length flash attention takes all segments at once. With Transformer Engine none of this is
used: its own kernels know the packed (``thd``) format.
"""

from __future__ import annotations

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch.nn.functional import scaled_dot_product_attention

_HALF = (torch.float16, torch.bfloat16)


class SegmentAttention(DotProductAttention):
    """Megatron's unfused attention, plus the packed format."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: object = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        if packed_seq_params is None:
            return super().forward(
                query, key, value, attention_mask, attn_mask_type, attention_bias, None
            )
        dropout = self.attention_dropout.p if self.training else 0.0
        if query.is_cuda and query.dtype in _HALF and dropout == 0.0:
            return self._flash(query, key, value, packed_seq_params)
        if dropout and not self.config.sequence_parallel:
            with tensor_parallel.get_cuda_rng_tracker().fork():
                return self._by_segment(query, key, value, packed_seq_params, dropout)
        return self._by_segment(query, key, value, packed_seq_params, dropout)

    @property
    def _scale(self) -> float:
        """Factor of the scores; under query-key layer scaling upstream undoes half of it later."""
        return float(self.softmax_scale * (self.scale_mask_softmax.scale or 1.0))

    def _by_segment(
        self,
        query_thd: torch.Tensor,
        key_thd: torch.Tensor,
        value_thd: torch.Tensor,
        packed: PackedSeqParams,
        dropout: float,
    ) -> torch.Tensor:
        """``(tokens, heads, channels)`` in, ``(tokens, heads * channels)`` out."""
        lengths = packed.cu_seqlens_q.diff().tolist()
        # One split and one concatenation: slicing segment by segment would make autograd add up a
        # full-size gradient for each of them, a cost of tokens x segments.
        parts = zip(
            *(
                tensor.transpose(0, 1).split(lengths, 1)
                for tensor in (query_thd, key_thd, value_thd)
            ),
            strict=True,
        )
        grouped = query_thd.size(1) != key_thd.size(1)
        outputs = [
            scaled_dot_product_attention(
                q[None],
                k[None],
                v[None],
                is_causal=True,
                dropout_p=dropout,
                scale=self._scale,
                enable_gqa=grouped,
            )[0]
            for q, k, v in parts
        ]
        return torch.cat(outputs, dim=1).transpose(0, 1).reshape(query_thd.size(0), -1)

    def _flash(
        self,
        query_thd: torch.Tensor,
        key_thd: torch.Tensor,
        value_thd: torch.Tensor,
        packed: PackedSeqParams,
    ) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        longest = int(packed.cu_seqlens_q.diff().max())
        output = varlen_attn(
            query_thd.contiguous(),
            key_thd.contiguous(),
            value_thd.contiguous(),
            packed.cu_seqlens_q,
            packed.cu_seqlens_kv,
            longest,
            longest,
            scale=self._scale,
            window_size=(-1, 0),
            enable_gqa=query_thd.size(1) != key_thd.size(1),
        )
        assert isinstance(output, torch.Tensor), "no auxiliary output was asked for"
        return output.reshape(query_thd.size(0), -1)
