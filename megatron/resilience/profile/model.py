"""A real Megatron model of a given shape on one tensor-parallel group, outside any training job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training.models.gpt import GPTModelConfig
from torch.nn.functional import gelu, silu

from megatron.resilience.model import packed_rotary
from megatron.resilience.model.layers import layer_spec
from resihp_ext.cost.model_shape import ModelShape

_GROUPS = ("tp", "tp_cp", "tp_ep", "tp_dp_cp", "expt_tp", "mp", "tp_ep_pp")
_ALONE = ("pp", "cp", "ep", "dp", "dp_cp", "expt_dp")


def build(
    shape: ModelShape,
    *,
    group: Any,
    alone: Any,
    device: torch.device,
    dtype: torch.dtype,
    sequence_parallel: bool = False,
) -> GPTModel:
    """Builds the whole model with Megatron's local layers and ours.

    Args:
        group: Process group of the ranks that share the model.
        alone: Process group of this rank.
    """
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.attention_heads,
        num_query_groups=shape.query_groups,
        gated_linear_unit=shape.gated,
        activation_func=silu if shape.gated else gelu,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        transformer_impl="local",
        use_cpu_initialization=True,
        # All kernels that need Apex or Transformer Engine.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=group.size(),
        sequence_parallel=sequence_parallel and group.size() > 1,
    )
    groups = {**dict.fromkeys(_GROUPS, group), **dict.fromkeys(_ALONE, alone)}
    model = GPTModel(
        config,
        layer_spec(GPTModelConfig(transformer=config), None, pp_rank=0),
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.seq_length,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=shape.tied,
        pg_collection=ProcessGroupCollection(embd=None, pos_embd=None, **groups),
    )
    packed_rotary.install([model])
    return model.to(device=device)


def packed(lengths: Sequence[int], device: torch.device) -> PackedSeqParams:
    """Describes one sequence of segments of the given lengths (tokens)."""
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
