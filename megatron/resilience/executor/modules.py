"""Builds a rank's modules for a new seat, through upstream's builder, while the job runs."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.utils import get_model_config

from megatron.resilience.executor.place import Seat
from megatron.resilience.upstream import arguments

Customise = Callable[[Any], None]
"""Puts this project's layers into Megatron's model config."""

_DEGREES = (
    "tensor_model_parallel_size",
    "tensor_parallel_num_weight_shards",
    "expert_tensor_parallel_size",
    "expert_tensor_parallel_num_weight_shards",
)
"""Arguments that upstream sets to the tensor-parallel degree when it validates them."""

_CARRIED = ("timers", "grad_scale_func", "finalize_model_grads_func", "no_sync_func")
"""What upstream's training loop has set on the config of the first modules."""


class ModuleFactory:
    """Makes modules for any seat, as the command line describes the model."""

    def __init__(
        self, args: argparse.Namespace, customise: Customise, *, sequence_parallel: bool
    ) -> None:
        """Keeps what all seats have in common.

        Args:
            args: Megatron's arguments; a seat's degrees are written into them.
            sequence_parallel: Whether stages with a degree above 1 use sequence parallelism.
        """
        self._args = args
        self._customise = customise
        self._sequence_parallel = sequence_parallel

    # A recovery may come in the middle of the optimizer's step, which records no gradients.
    @torch.enable_grad()
    def build(self, seat: Seat, groups: Any, told: Any) -> list[torch.nn.Module]:
        """Builds the model chunks of a seat, with weights that are not initialised.

        Args:
            told: Config of the modules before: what the training loop has set on it stays.
        """
        self.describe(seat)
        config, container = arguments.configurations(self._args)
        self._customise(config)
        for name in ("init_method", "output_layer_init_method", "embedding_init_method"):
            # Weights that arrive from elsewhere a moment later need no random numbers.
            setattr(config.transformer, name, _keep)
        models: list[torch.nn.Module] = config.get_builder_cls()(config).build_distributed_models(
            pg_collection=groups, ddp_config=container.ddp, data_parallel_random_init=False
        )
        for model in models:
            for name in _CARRIED:
                setattr(get_model_config(model), name, getattr(told, name))
            model.train()
        return models

    def describe(self, seat: Seat) -> None:
        """Writes a seat into Megatron's arguments, which some of its code reads at run time."""
        args = self._args
        for name in _DEGREES:
            setattr(args, name, seat.tp)
        args.pipeline_model_parallel_size = seat.pipeline
        args.transformer_pipeline_model_parallel_size = seat.pipeline
        args.sequence_parallel = self._sequence_parallel and seat.tp > 1
        args.pipeline_model_parallel_layout = seat.layout_text()


def _keep(_weight: torch.Tensor) -> None:
    """Initialises nothing."""


def own_memory(models: Sequence[torch.nn.Module]) -> None:
    """Gives modules that stay memory of their own again, apart from buffers that go."""
    for model in models:
        for parameter in model.parameters():
            if parameter.untyped_storage().nbytes() > parameter.nbytes:
                parameter.data = parameter.data.clone()
            gradient: torch.Tensor = parameter.main_grad  # type: ignore[attr-defined]
            if gradient.untyped_storage().nbytes() > gradient.nbytes:
                parameter.main_grad = torch.zeros_like(gradient)  # type: ignore[attr-defined]


def exempt_what_is_here() -> None:
    """Lets the garbage collector look only at what is made from now on.

    Call it before modules are built: whatever is there by then stays as long as the process. Of
    400,000 objects of imported code, a collection then looks at none, which takes 2 ms in the place
    of 220.
    """
    gc.freeze()


def forget_modules() -> None:
    """Frees modules that nobody refers to any more but caches and reference cycles."""
    cached = RotaryEmbedding.forward
    while not hasattr(cached, "cache_clear") and hasattr(cached, "__wrapped__"):
        cached = cached.__wrapped__
    cached.cache_clear()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
