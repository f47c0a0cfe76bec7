"""Megatron's wrapper that adds up gradients, without its own buffers where ours serve."""

from __future__ import annotations

from collections.abc import Collection

import torch


def free_gradients(model: torch.nn.Module, elsewhere: Collection[int]) -> None:
    """Frees gradient buffers of a wrapped model chunk that no parameter uses any more.

    Args:
        elsewhere: ``id`` of every parameter whose ``main_grad`` is not in the wrapper's buffers.
    """
    for buffer in getattr(model, "buffers", ()):
        if not all(id(parameter) in elsewhere for parameter in buffer.param_to_bucket):
            continue
        nothing = buffer.grad_data.new_empty(0)
        buffer.grad_data = nothing
        for bucket in buffer.buckets:
            bucket.grad_data = nothing


def let_go(model: torch.nn.Module) -> None:
    """Empties a wrapped model chunk that is not trained any more.

    Loop variables of ``train`` and ``train_step`` refer to a wrapper as long as they run, and its
    hooks on gradient accumulators refer to it in a circle through C++ that the garbage collector
    does not see. Without this, groups and weights of earlier layouts would stay.
    """
    vars(model).clear()
