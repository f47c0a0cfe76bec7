"""Where a rank becomes an emulated device, if the job says so."""

from __future__ import annotations

import argparse

from megatron.resilience.emulation.pacer import Pacer
from megatron.resilience.executor.executor import Executor
from megatron.resilience.executor.start import Planned
from megatron.resilience.faults.config import JobFaults
from megatron.resilience.faults.refusal import is_emulated
from megatron.resilience.settings import Settings
from megatron.resilience.upstream.arguments import current_args
from megatron.resilience.upstream.policy import policy_of
from resihp_ext.control.worker_environment import WorkerEnvironment
from resihp_ext.faults.fault import LASTING


def begin_emulation(
    executor: Executor,
    settings: Settings,
    layout: Planned,
    agent: WorkerEnvironment | None,
    args: argparse.Namespace,
) -> JobFaults:
    """Slows this rank down if devices are emulated.

    Args:
        args: Megatron's arguments.

    Returns:
        The job's faults.

    Raises:
        UserError: a file that cannot be used.
    """
    scene = settings.emulation.read()
    rank = layout.rank
    tagged = args.distributed_backend == "gloo"
    faults = settings.faults.read(rank.world_size, emulated=scene is not None, tagged=tagged)
    if scene is None:
        return JobFaults(real=faults, tagged=tagged)
    slow = [one for one in faults if one.kind in LASTING and is_emulated(one)]
    executor.player.pacer = Pacer(
        scene,
        rank=rank.rank,
        node="" if agent is None else agent.node,
        seq_length=args.seq_length,
        faults=slow,
        policy=policy_of(args, sequence_parallel=layout.sequence_parallel),
        step=lambda: int(current_args().curr_iteration) + 1,
    )
    return JobFaults(real=tuple(one for one in faults if one not in slow), emulated=slow)
