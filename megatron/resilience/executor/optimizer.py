"""Megatron's optimizer interface over sync domains: one gradient norm, flat masters, torch's Adam.

The base optimizer, its parameter groups and their rules for decay and learning rate are upstream's;
only what it updates is replaced: flat fp32 masters of this rank's share of each domain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer

from megatron.resilience.executor.buffers import DomainBuffer
from megatron.resilience.executor.manifest import Piece
from resihp_ext.errors import ResiHPError


def base_optimizer(
    config: Any, models: Sequence[torch.nn.Module], overrides: Any, pg_collection: Any
) -> torch.optim.Optimizer | None:
    """Upstream's optimizer for these settings, over the modules' parameters, without any state.

    Collective over all live ranks; None when this rank holds no parameters.
    """
    plain = dataclasses.replace(config, bf16=False, use_distributed_optimizer=False)
    built = get_megatron_optimizer(
        plain,
        list(models),
        config_overrides=overrides,
        use_gloo_process_groups=False,
        pg_collection=pg_collection,
    )
    inner = getattr(built, "chained_optimizers", [built])[0]
    base: torch.optim.Optimizer | None = inner.optimizer
    return base


def groups_of(base: torch.optim.Optimizer | None, pieces: Sequence[Piece]) -> dict[str, int]:
    """Number of the parameter group of every logical tensor that a rank holds."""
    number = {
        id(parameter): k
        for k, group in enumerate(base.param_groups if base else ())
        for parameter in group["params"]
    }
    return {piece.slab.tensor: number[id(piece.parameter)] for piece in pieces}


class DomainOptimizer(MegatronOptimizer):
    """Steps every domain that this rank owns a part of."""

    def __init__(
        self,
        base: torch.optim.Optimizer | None,
        config: Any,
        buffers: Sequence[DomainBuffer],
        groups: Mapping[str, int],
        device: torch.device,
    ) -> None:
        """Puts the masters in the place of the parameters that ``base`` was built over.

        Args:
            groups: Parameter group of each tensor.
            device: Where the backend wants its tensors.
        """
        super().__init__(base, config)
        self.is_stub_optimizer = False
        self.buffers = list(buffers)
        self._device = device
        self._loaded = False
        self._scale = torch.ones(1, device=device)
        self.flat: list[tuple[DomainBuffer, int, torch.Tensor]] = []
        """``(buffer, first element of the share, masters)`` of every tensor of ``base``."""
        if base is None:
            return
        per_group: dict[int, list[torch.Tensor]] = {}
        for buffer in self.buffers:
            for section in buffer.sections(groups):
                masters = buffer.master[section.low - buffer.low : section.high - buffer.low]
                masters.grad = buffer.gradient[section.low : section.high]
                per_group.setdefault(section.group, []).append(masters)
                self.flat.append((buffer, section.low - buffer.low, masters))
        for number, group in enumerate(base.param_groups):
            group["params"] = per_group.get(number, [])

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Clips by the norm over all logical elements and updates the weights.

        The norm's reduction comes after every domain is reduced: whoever has it knows that all
        live ranks hold final gradients.
        """
        norm, zeros = self.gradient_norm()
        self.clip(norm)
        if self.optimizer is not None:
            self.optimizer.step()
        for buffer in self.buffers:
            buffer.parameters_from_masters()
        return True, norm, zeros

    def gradient_norm(self) -> tuple[float, int | None]:
        """Norm, and if it is logged the number of zeros; the same bits on every rank."""
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for buffer in self.buffers:
            sums[0] += buffer.square_sum()
            if self.config.log_num_zeros_in_grad:
                sums[1] += buffer.zeros()
        dist.all_reduce(sums)
        norm = float(sums[0].sqrt())
        return norm, int(sums[1]) if self.config.log_num_zeros_in_grad else None

    def clip(self, norm: float) -> None:
        """Scales all gradients so that their norm is at most ``--clip-grad``."""
        limit = self.config.clip_grad
        factor = limit / (norm + 1.0e-6)
        if limit > 0.0 and factor < 1.0:
            for buffer in self.buffers:
                buffer.gradient[buffer.low : buffer.high].mul_(factor)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do: a step overwrites the gradients."""

    def get_loss_scale(self) -> torch.Tensor:
        return self._scale

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Bf16 and fp32 need no scale."""
        return loss

    def prepare_grads(self) -> bool:
        return False

    def step_with_ready_grads(self) -> bool:
        return self.step()[0]

    def reload_model_params(self, state_dict: Any = None) -> None:
        """Takes the modules' weights as the masters, after a checkpoint was loaded into them."""
        for buffer in self.buffers:
            buffer.masters_from_parameters()

    def adopt_parameters(self) -> None:
        """Before the first step: masters of weights that are fp32 are these weights.

        Half-precision weights have masters of their own, which a checkpoint brings; without one,
        they start from the weights as well.
        """
        if not self.config.bf16 or not self._loaded:
            self.reload_model_params()

    def state_dict(self, is_loading: bool = False) -> Any:
        raise ResiHPError("checkpoints of the optimizer are kept in Megatron's torch_dist format")

    def load_state_dict(self, state_dict: Any) -> None:
        raise NotImplementedError

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> Any:
        raise NotImplementedError
