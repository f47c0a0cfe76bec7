"""Patch: Megatron's "CUDA" random state is the CPU generator's state.

Symbol: ``megatron.core.tensor_parallel.random._get_cuda_rng_state`` and ``_set_cuda_rng_state``.
Versions: megatron-core 0.19.x.
Reason: both reach for CUDA generators; setting waits until CUDA is initialised, that is, for ever.
Delete when: upstream's tracker takes its generator from the device.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from megatron.resilience.patches.base import Patch, signature_drift, upstream_module

_MODULE = "megatron.core.tensor_parallel.random"
_SPURIOUS = "CPU RNG state changed within GPU RNG context"


def _get(*_args: Any, **_kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set(new_state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
    torch.set_rng_state(new_state)


def _keep(record: logging.LogRecord) -> bool:
    # With one generator for both roles, a fork that draws changes "the CPU state" by design.
    return record.getMessage() != _SPURIOUS


class RngState(Patch):
    """Points the random-state tracker at the CPU generator."""

    symbol = f"{_MODULE}._[gs]et_cuda_rng_state"
    reason = "the tracker saves and restores CUDA generators"
    delete_when = "upstream's tracker takes its generator from the device"

    def drift(self) -> str | None:
        module = upstream_module(_MODULE)
        return signature_drift(
            module._get_cuda_rng_state, "device, clone, graph_safe"
        ) or signature_drift(module._set_cuda_rng_state, "new_state, device, graph_safe")

    def install(self) -> None:
        module = upstream_module(_MODULE)
        self.replace(module, "_get_cuda_rng_state", _get)
        self.replace(module, "_set_cuda_rng_state", _set)
        logging.getLogger(_MODULE).addFilter(_keep)

    def undo(self) -> None:
        super().undo()
        logging.getLogger(_MODULE).removeFilter(_keep)
