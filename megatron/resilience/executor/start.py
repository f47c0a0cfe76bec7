"""Whether a job runs plans of its own, and what that means for its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.resilience.executor.executor import Executor
from megatron.resilience.executor.limits import prepare, refuse, require_fit
from megatron.resilience.executor.place import Seat
from megatron.resilience.settings import Settings
from megatron.resilience.upstream import arguments
from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import UserError
from resihp_ext.plan.plan import Device
from resihp_ext.plan.timetable import Entry, Frame, read_timetable


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A job whose layouts come from a timetable."""

    timetable: tuple[Entry, ...]
    rank: RankEnvironment
    sequence_parallel: bool
    """Whether stages with a degree above 1 are to use it."""

    @property
    def seat(self) -> Seat:
        """This rank's place in the first plan."""
        return Seat.of(self.timetable[0].plan, self.rank.rank)

    def parse(self, words: Sequence[str], add_flags: Callable[[Any], Any]) -> argparse.Namespace:
        """Lets Megatron parse and validate the command line of one replica like this rank's.

        With just one replica, Megatron counts all micro-batches of the global batch, and samples
        rightly.
        """
        seat = self.seat
        return arguments.parse(seat.flags(words), add_flags, world_size=seat.tp * seat.pipeline)

    def executor(
        self, args: argparse.Namespace, settings: Settings, device: torch.device
    ) -> Executor | None:
        """Prepares the executor of the first plan."""
        refuse(args, settings.initial_weights.initial_weights)
        require_fit(self.timetable, args, sequence_parallel=self.sequence_parallel)
        redundancy = settings.executor.optimizer_redundancy
        if redundancy is None:
            redundancy = "buddy" if args.use_distributed_optimizer else "replicated"
        prepare(args)
        plan = self.timetable[0].plan
        return Executor(plan, self.rank.rank, device=device, redundancy=redundancy)


@dataclass(frozen=True, kw_only=True, slots=True)
class Upstream:
    """A job in Megatron's own uniform layout, run by Megatron's own schedules."""

    def parse(self, words: Sequence[str], add_flags: Callable[[Any], Any]) -> argparse.Namespace:
        """Lets Megatron parse and validate the command line."""
        return arguments.parse(words, add_flags)

    def executor(
        self, args: argparse.Namespace, settings: Settings, device: torch.device
    ) -> Executor | None:
        """There is none."""
        return None


def planned_layout(
    words: Sequence[str], settings: Settings, rank: RankEnvironment
) -> Planned | Upstream:
    """Reads the timetable, if the job has one.

    Raises:
        UserError: a file that cannot be used, or flags that it needs.
    """
    path = settings.executor.plan_schedule
    if path is None:
        return Upstream()
    if not settings.resilience.resilience:
        raise UserError("--resilience-plan-schedule needs --resilience")
    return Planned(
        timetable=read_timetable(path, _frame(words, rank)),
        rank=rank,
        sequence_parallel="--sequence-parallel" in words,
    )


def _frame(words: Sequence[str], rank: RankEnvironment) -> Frame:
    """What a plan has to fit, from the few flags that say so."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = arguments.refuse  # type: ignore[method-assign]
    for flag in ("--num-layers", "--global-batch-size", "--micro-batch-size"):
        parser.add_argument(flag, type=int)
    known, _ = parser.parse_known_args(list(words))
    for name, value in vars(known).items():
        if not value or value < 1:
            raise UserError(f"--resilience-plan-schedule needs --{name.replace('_', '-')}")
    if known.global_batch_size % known.micro_batch_size:
        raise UserError(
            f"--global-batch-size {known.global_batch_size} is not a multiple of "
            f"--micro-batch-size {known.micro_batch_size}"
        )
    return Frame(
        num_layers=known.num_layers,
        micro_batches=known.global_batch_size // known.micro_batch_size,
        devices=tuple(
            Device(rank=number, node=number // rank.local_world_size)
            for number in range(rank.world_size)
        ),
    )
