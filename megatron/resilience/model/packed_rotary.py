"""Rotary embeddings that start again at every document, at a cost linear in the tokens.

Upstream's unfused code for packed sequences writes each document's slice into one tensor in place;
autograd then copies the whole gradient once a document, a cost of tokens x documents that would
break ``alpha * N + beta * sum(l_i ** 2)``. The same code has a linear path for a table that covers
the whole packed batch; :class:`PackedRotary` hands it a table gathered by position in the document.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams


def positions_in_segments(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Position of every token in its own segment: ``[0, 3, 5] -> [0, 1, 2, 0, 1]``."""
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    total = int(cu_seqlens[-1])
    return torch.arange(total, device=cu_seqlens.device) - starts.repeat_interleave(lengths)


class PackedRotary(torch.nn.Module):
    """Wraps a model's rotary embedding; unpacked batches pass through untouched."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self._positions: torch.Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.inner, name)

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> int:
        """Length of the table that :meth:`forward`, called next by the model, has to give."""
        length = self.inner.get_rotary_seq_len(
            inference_context,
            transformer,
            transformer_input,
            transformer_config,
            packed_seq_params,
        )
        if packed_seq_params is None:
            self._positions = None
        else:
            self._positions = positions_in_segments(packed_seq_params.cu_seqlens_q)
        return int(length)

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Table of shape ``(tokens or max_seq_len, 1, 1, channels)``."""
        table: torch.Tensor = self.inner(max_seq_len, *args, **kwargs)
        return table if self._positions is None else table.index_select(0, self._positions)


def install(models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Pre-wrap hook: wraps the rotary embedding of each model chunk that has one."""
    for model in models:
        if getattr(model, "position_embedding_type", None) == "rope":
            rotary = model.rotary_pos_emb
            assert isinstance(rotary, torch.nn.Module)
            model.rotary_pos_emb = PackedRotary(rotary)
    return models
