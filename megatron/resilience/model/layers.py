"""Which modules a Transformer layer is made of.

Upstream's own choice, with two replacements where Transformer Engine is not used: a norm that
supports sequence parallelism and a core attention that knows packed documents.
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megatron.resilience.model.norm import SequenceParallelNorm
from megatron.resilience.model.segment_attention import SegmentAttention


def layer_spec(config: GPTModelConfig, vp_stage: int | None = None, *, pp_rank: int) -> Any:
    """Gives the layers of one pipeline stage.

    Args:
        vp_stage: Index of the model chunk, when the stage is divided into several.
        pp_rank: This rank's pipeline stage.
    """
    spec = default_layer_spec(config, vp_stage)
    if config.transformer.transformer_impl != "local":
        return spec
    if isinstance(spec, TransformerBlockSubmodules):
        for layer in spec.layer_specs:
            _replace(layer.submodules)
        spec.layer_norm = SequenceParallelNorm
        return spec
    _replace(spec.submodules)
    layers = get_num_layers_to_build(config.transformer, vp_stage=vp_stage, pp_rank=pp_rank)
    return TransformerBlockSubmodules(layer_specs=[spec] * layers, layer_norm=SequenceParallelNorm)


def _replace(submodules: Any) -> None:
    """Swaps norms and core attention of one layer's submodules, leaving absent ones absent."""
    for name in ("input_layernorm", "pre_mlp_layernorm"):
        if getattr(submodules, name) is not IdentityOp:
            setattr(submodules, name, SequenceParallelNorm)
    attention = submodules.self_attention.submodules
    for name in ("q_layernorm", "k_layernorm"):
        if getattr(attention, name, IdentityOp) is WrappedTorchNorm:
            setattr(attention, name, SequenceParallelNorm)
    attention.core_attention = SegmentAttention
