"""Figures of a step over all ranks: tokens, losses, and the lengths of packed documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron.resilience.executor.guard import Figures

if TYPE_CHECKING:
    from megatron.resilience.executor.place import Seat
    from megatron.resilience.executor.runtime import Step
    from resihp_ext.plan.plan import Plan

LOSSES = ("lm loss",)
"""Keys of what the forward step reports: a sum and the number of tokens of each."""


def totals(step: Step, seat: Seat, device: torch.device) -> Figures:
    """Sums over all stage instances: tokens, then loss and tokens of each key; collective."""
    sums = torch.zeros(1 + 2 * len(LOSSES), dtype=torch.float64, device=device)
    # All ranks of a tensor-parallel group report the same.
    if seat.tp_rank == 0:
        sums[0] += step.tokens
        for report in step.reports:
            for k, key in enumerate(LOSSES):
                sums[1 + 2 * k : 3 + 2 * k] += report[key].double()
    return summed(sums)


def report(figures: Figures, device: torch.device, *, means: bool) -> dict[str, torch.Tensor]:
    """What the training loop is told of :func:`totals`.

    Args:
        means: Of a training step; of an evaluation sum and tokens, which upstream adds up.
    """
    sums = torch.tensor(figures, dtype=torch.float64, device=device)
    pairs = {key: sums[1 + 2 * k : 3 + 2 * k] for k, key in enumerate(LOSSES)}
    if not means:
        return {key: pair.float() for key, pair in pairs.items()}
    return {key: (pair[0] / pair[1].clamp(min=1)).float() for key, pair in pairs.items()}


def lengths_here(
    local: torch.Tensor | None, plan: Plan, seat: Seat, device: torch.device
) -> torch.Tensor:
    """Tokens and squared segment lengths for which this rank speaks.

    Args:
        local: The two sums over the micro-batches that this rank has run.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    ends = [one for one in seat.chunks if plan.stage(one).layers[1] == plan.num_layers]
    if ends and seat.tp_rank == 0 and local is not None:
        sums += local / len(seat.chunks)
    return sums


def summed(sums: torch.Tensor) -> Figures:
    """Over all ranks; collective."""
    dist.all_reduce(sums)
    return tuple(sums.tolist())
