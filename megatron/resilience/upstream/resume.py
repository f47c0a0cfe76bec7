"""Which checkpoint a job starts from, agreed by all ranks before Megatron loads anything."""

from __future__ import annotations

import argparse
from datetime import timedelta

from torch import distributed

from megatron.resilience.checkpoint.agree import Seat, agree_on_checkpoint
from megatron.resilience.checkpoint.config import CheckpointSafetyConfig
from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import UserError

_RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Longest wait for the other ranks to start: imports alone take a minute on a cold file system."""


def job_store(rank: RankEnvironment, attempt: int = 0) -> distributed.Store:
    """Opens the store through which the ranks of a job meet.

    Args:
        attempt: Which start of all workers this is. The launcher's store outlives them: what those
            before have left there is no answer to these.

    Raises:
        UserError: several ranks, but nobody told where they meet.
    """
    if rank.world_size == 1 and rank.master_addr is None:
        return distributed.HashStore()
    if rank.master_addr is None or rank.master_port is None:
        raise UserError(
            f"WORLD_SIZE={rank.world_size} without MASTER_ADDR and MASTER_PORT; "
            "start the job with resihp-run"
        )
    store, _, _ = next(iter(distributed.rendezvous("env://", timeout=_RENDEZVOUS_TIMEOUT)))
    return distributed.PrefixStore(f"attempt/{attempt}", store)


def resolve_load(
    args: argparse.Namespace,
    config: CheckpointSafetyConfig,
    store: distributed.Store,
    rank: RankEnvironment,
) -> int:
    """Points Megatron's arguments at the newest sound checkpoint of ``--load``; collective.

    Returns:
        The step that the checkpoint holds; 0 when training starts from the first.

    Raises:
        UserError: ``--load`` was given and nothing can be loaded: training never starts from
            random weights by accident.
        AgreementError: a rank did not answer in time.
    """
    if args.load is None:
        return 0
    # Upstream would go on from random weights with a warning.
    args.exit_on_missing_checkpoint = True
    if args.ckpt_format != "torch_dist":
        return 0
    seat = Seat(
        store=distributed.PrefixStore("resihp", store),
        rank=rank.rank,
        world_size=rank.world_size,
        timeout_s=config.verify_checkpoint_timeout_s,
    )
    choice = agree_on_checkpoint(
        seat,
        args.load,
        args.save,
        level=config.verify_checkpoint,
        ckpt_step=args.ckpt_step,
        report=report,
    )
    if choice.directory is None:
        args.load = None
    elif choice.iteration is not None:
        args.ckpt_step = choice.iteration
    return 0 if args.finetune else choice.iteration or 0


def report(line: str) -> None:
    """Shows one line about the checkpoint; called on rank 0 only."""
    print(f"resihp: {line}", flush=True)  # noqa: T201 - a line for people
