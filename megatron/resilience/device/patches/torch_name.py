"""Patch: the name ``torch`` inside the Megatron modules that spell their device ``"cuda"``.

Symbol: ``<module>.torch`` for each module of :data:`MODULES`.
Versions: megatron-core 0.19.x.
Reason: upstream writes ``device="cuda"`` and ``torch.cuda.*`` as literals; there is no seam.
Delete when: upstream takes the device from one place.
"""

from __future__ import annotations

import torch

from megatron.resilience.device.stand_in import CpuTorch
from megatron.resilience.patches.base import Patch, upstream_module

_CORE = """
dist_checkpointing.exchange_utils dist_checkpointing.strategies.async_utils
dist_checkpointing.strategies.filesystem_async dist_checkpointing.strategies.fully_parallel
dist_checkpointing.strategies.state_dict_saver dist_checkpointing.tensor_aware_state_dict
distributed.distributed_data_parallel distributed.param_and_grad_buffer
models.common.embeddings.rope_utils models.common.embeddings.rotary_pos_embedding
models.common.embeddings.yarn_rotary_pos_embedding models.common.language_module.language_module
models.gpt.gpt_model optimizer.clip_grads optimizer.distrib_optimizer optimizer.grad_scaler
optimizer.layer_wise_optimizer optimizer.optimizer parallel_state
pipeline_parallel.p2p_communication pipeline_parallel.schedules pipeline_parallel.utils
rerun_state_machine resharding.copy_services.gloo_copy_service resharding.execution
tensor_parallel.data tensor_parallel.layers tensor_parallel.mappings tensor_parallel.random
tensor_parallel.utils timers transformer.attention transformer.dot_product_attention
transformer.moe.moe_layer transformer.moe.moe_logging transformer.moe.moe_utils
transformer.moe.router transformer.moe.shared_experts transformer.moe.token_dispatcher
transformer.multi_token_prediction transformer.transformer_layer transformer.utils utils
"""

_TRAINING = """
arguments checkpointing dist_signal_handler ft_integration models.dist_utils training
utils.common_utils
"""

MODULES: tuple[str, ...] = (
    *(f"megatron.core.{name}" for name in _CORE.split()),
    *(f"megatron.training.{name}" for name in _TRAINING.split()),
)

REFUSES_WITHOUT_CUDA = "megatron.training.initialize"
"""The one module that asserts ``torch.cuda.is_available()`` before it does anything."""


class TorchName(Patch):
    """Binds ``torch`` in Megatron's modules to a stand-in whose ``"cuda"`` is the CPU."""

    symbol = "megatron.*.torch"
    reason = "device literals 'cuda' and torch.cuda calls"
    delete_when = "upstream takes the device from one place"

    def drift(self) -> str | None:
        for name in (*MODULES, REFUSES_WITHOUT_CUDA):
            if getattr(upstream_module(name), "torch", None) is not torch:
                return f"{name} no longer imports torch by that name"
        return None

    def install(self) -> None:
        stand_in = CpuTorch()
        for name in MODULES:
            self.replace(upstream_module(name), "torch", stand_in)
        self.replace(upstream_module(REFUSES_WITHOUT_CUDA), "torch", CpuTorch(cuda_available=True))
