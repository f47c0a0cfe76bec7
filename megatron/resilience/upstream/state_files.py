"""Model and optimizer state from and to Megatron's checkpoints, in a job that runs already.

Upstream's own loading writes into its arguments, counters and schedule as well, which in a running
job are right as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.utils import unwrap_model
from megatron.training.checkpointing import generate_state_dict, save_checkpoint
from torch.distributed.checkpoint.api import CheckpointException

from megatron.resilience.upstream.arguments import current_args
from resihp_ext.errors import CheckpointError


def load_state(
    models: Sequence[torch.nn.Module], optimizer: Any, directory: Path, groups: Any
) -> None:
    """Loads a checkpoint into modules and optimizer, whatever layout it was saved in; collective.

    Args:
        optimizer: None: only the weights.
        groups: The collection of process groups in force.
    """
    args, chunks = current_args(), unwrap_model(list(models))
    common = dist_checkpointing.load_common_state_dict(str(directory))
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    metadata["dp_cp_group"] = groups.dp_cp_gtp_remat
    wanted = generate_state_dict(
        args,
        chunks,
        optimizer,
        None,
        None,
        optim_sd_kwargs={"metadata": metadata, "is_loading": True},
        model_sd_kwargs={"metadata": metadata},
    )
    with _our_errors(directory):
        found = dist_checkpointing.load(
            wanted,
            str(directory),
            validate_access_integrity=args.ckpt_load_validate_sharding_integrity,
            strict=args.dist_ckpt_strictness,
        )
    for number, model in enumerate(models):
        model.load_state_dict(found["model" if len(models) == 1 else f"model{number}"])
    if optimizer is not None:
        optimizer.load_state_dict(found["optimizer"])


def save_state(
    models: Sequence[torch.nn.Module],
    optimizer: Any,
    scheduler: Any,
    *,
    step: int,
    samples: int,
    groups: dict[str, Any],
) -> None:
    """Saves a checkpoint under ``--save``, also in the middle of a step; collective.

    Args:
        scheduler: Upstream's parameter scheduler.
        step: Steps that the state has behind it.
        samples: Samples that it has behind it.
        groups: What upstream's saving takes by name.
    """
    args = current_args()
    with _as_after(args, scheduler, samples), _our_errors(args.save):
        save_checkpoint(
            step,
            list(models),
            optimizer,
            scheduler,
            args.num_floating_point_operations_so_far,
            **groups,
        )


@contextmanager
def _our_errors(place: Path | str) -> Iterator[None]:
    """torch's error for a rank that cannot read or write is no ``Exception``."""
    try:
        yield
    except CheckpointException as error:
        rank, (reason, _) = next(iter(error.failures.items()))
        raise CheckpointError(f"{place}: rank {rank} of those left: {reason}") from error


@contextmanager
def _as_after(args: Any, scheduler: Any, samples: int) -> Iterator[None]:
    """Counters as they are behind so many samples; upstream's loop moves them on only after the
    optimizer's step."""
    kept = args.consumed_train_samples, scheduler.num_steps, args.async_save
    args.consumed_train_samples, args.async_save = samples, False
    scheduler.num_steps += samples - kept[0]
    try:
        yield
    finally:
        args.consumed_train_samples, scheduler.num_steps, args.async_save = kept
