"""Patch: ``torch.Tensor.cuda`` returns the tensor itself.

Symbol: ``torch.Tensor.cuda``.
Versions: any torch; the method raises on a machine without CUDA, so nobody depends on it there.
Reason: upstream moves modules and batches with ``.cuda()``, a method, which no module name reaches.
Delete when: upstream moves tensors with ``.to(device)``.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.resilience.patches.base import Patch


def _already_there(tensor: torch.Tensor, *_args: Any, **_kwargs: Any) -> torch.Tensor:
    return tensor


class TensorCuda(Patch):
    """Makes ``tensor.cuda()`` the identity."""

    symbol = "torch.Tensor.cuda"
    reason = "upstream moves modules and batches with .cuda()"
    delete_when = "upstream moves tensors with .to(device)"

    def drift(self) -> str | None:
        return None if callable(getattr(torch.Tensor, "cuda", None)) else "Tensor.cuda is gone"

    def install(self) -> None:
        self.replace(torch.Tensor, "cuda", _already_there)
