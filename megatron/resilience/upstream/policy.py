"""What Megatron's arguments say about memory and recomputation, as the cost model takes it."""

from __future__ import annotations

import argparse

from resihp_ext.cost.memory import MemoryPolicy


def policy_of(args: argparse.Namespace, *, sequence_parallel: bool) -> MemoryPolicy:
    """The policy of a job.

    Args:
        args: Megatron's arguments.
        sequence_parallel: Whether stages share sequences; a plan's job tells Megatron otherwise.
    """
    return MemoryPolicy(
        param_bytes=2 if args.bf16 else 4,
        master_bytes=4 if args.bf16 else 0,
        fused=args.transformer_impl != "local",
        sharded=False,
        sequence_parallel=sequence_parallel,
        recompute=args.recompute_granularity == "full",
    )
