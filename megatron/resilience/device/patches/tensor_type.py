"""Patch: ``torch.Tensor.type()`` spells CPU types as CUDA types, for Megatron's callers only.

Symbol: ``torch.Tensor.type``.
Versions: megatron-core 0.19.x (``optimizer.py``, ``distrib_optimizer.py``, ``clip_grads.py``).
Reason: upstream's optimizers compare ``param.type()`` with ``'torch.cuda.FloatTensor'``.
Delete when: upstream compares ``param.dtype``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from megatron.resilience.patches.base import Patch


def _spelled_for_megatron(original: Callable[..., Any]) -> Callable[..., Any]:
    def spell(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if isinstance(result, str) and caller.startswith("megatron.core."):
            return result.replace("torch.", "torch.cuda.", 1)
        return result

    return spell


class TensorType(Patch):
    """Answers ``torch.cuda.*`` to modules of ``megatron.core`` and the truth to all others."""

    symbol = "torch.Tensor.type"
    reason = "upstream's optimizers compare type names with 'torch.cuda.FloatTensor'"
    delete_when = "upstream compares dtypes"

    def drift(self) -> str | None:
        found = torch.zeros(1).type()
        return None if found == "torch.FloatTensor" else f"Tensor.type() answers {found!r}"

    def install(self) -> None:
        self.replace(torch.Tensor, "type", _spelled_for_megatron(torch.Tensor.type))
