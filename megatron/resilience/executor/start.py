"""Whether a job runs plans of its own, and what that means for its command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.resilience.executor.executor import Executor
from megatron.resilience.executor.limits import prepare, refuse, require_fit
from megatron.resilience.executor.place import Seat
from megatron.resilience.settings import Settings
from megatron.resilience.upstream import arguments
from megatron.resilience.upstream.batch_size import sizes_of
from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import UserError
from resihp_ext.plan.plan import Device, Plan, PlanError, uniform_plan
from resihp_ext.plan.timetable import Entry, Frame, read_timetable


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A job that runs plans: of a timetable, or first of all the uniform one of its flags."""

    timetable: tuple[Entry, ...]
    rank: RankEnvironment
    sequence_parallel: bool
    """Whether stages with a degree above 1 are to use it."""
    newcomer: bool = False
    """Whether this rank comes to a job that runs already: it starts alone, and without a stage."""

    @property
    def plan(self) -> Plan:
        """What this rank starts with."""
        first = self.timetable[0].plan
        if not self.newcomer:
            return first
        alone = Device(rank=self.rank.rank, node=0)
        return replace(first, devices=(alone,), replicas=(), routes=())

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks that start together."""
        return (self.rank.rank,) if self.newcomer else tuple(range(self.rank.world_size))

    @property
    def seat(self) -> Seat:
        """This rank's place in that."""
        return Seat.of(self.plan, self.rank.rank)

    def parse(self, words: Sequence[str], add_flags: Callable[[Any], Any]) -> argparse.Namespace:
        """Lets Megatron parse and validate the command line of one replica like this rank's.

        With just one replica, Megatron counts all micro-batches of the global batch, and samples
        rightly.
        """
        seat = self.seat
        words = without(words, _OF_A_GRID)
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
        executor = Executor(self.plan, self.rank.rank, device=device, redundancy=redundancy)
        executor.migrations.delta = settings.executor.migrate_delta_micro_batches
        if executor.migrations.delta and device.type != "cpu":
            # NCCL matches messages by their order and connects two ranks when they first speak; and
            # times of actions are those of the host.
            raise UserError("--resilience-migrate-delta-micro-batches needs --device cpu")
        return executor


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
    words: Sequence[str], settings: Settings, rank: RankEnvironment, *, newcomer: bool = False
) -> Planned | Upstream:
    """Finds out which plans the job runs, if any.

    Args:
        newcomer: Whether the job runs already.

    Raises:
        UserError: a file that cannot be used, or flags that do not go together.
    """
    path, resilience = settings.executor.plan_schedule, settings.resilience
    if path is not None and not resilience.resilience:
        raise UserError("--resilience-plan-schedule needs --resilience")
    if settings.executor.migrate_delta_micro_batches and not resilience.resilience:
        raise UserError("--resilience-migrate-delta-micro-batches needs --resilience")
    if not resilience.resilience or (resilience.resilience_observe_only and path is None):
        return Upstream()
    frame = _frame(words, rank)
    if path is None:
        timetable: tuple[Entry, ...] = (Entry(step=0, plan=_uniform(words, rank, frame)),)
    else:
        timetable = read_timetable(path, frame)
    return Planned(
        timetable=timetable,
        rank=rank,
        sequence_parallel="--sequence-parallel" in words,
        newcomer=newcomer,
    )


_DEGREES = {
    "--tensor-model-parallel-size": 1,
    "--pipeline-model-parallel-size": 1,
    "--num-virtual-stages-per-pipeline-rank": 1,
    "--num-layers-per-virtual-pipeline-stage": 0,
}
"""Flags of a uniform layout, with their defaults."""
_OF_A_GRID = ("--num-virtual-stages-per-pipeline-rank", "--num-layers-per-virtual-pipeline-stage")
"""Flags that a seat's own flags replace."""
_UNEVEN = (
    "--pipeline-model-parallel-layout",
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)


def _uniform(words: Sequence[str], rank: RankEnvironment, frame: Frame) -> Plan:
    """The layout that Megatron's flags describe."""
    uneven = [flag for flag in _UNEVEN if flag in words]
    if uneven:
        raise UserError(
            f"{', '.join(uneven)}: cannot be combined with --resilience; say which layers a stage "
            "has in a file for --resilience-plan-schedule"
        )
    found = _numbers(words, _DEGREES)
    tp, pp, virtual, depth = found.values()
    if depth:
        virtual = frame.num_layers // (pp * depth) or 1
    if min(tp, pp, virtual) < 1 or rank.world_size % (tp * pp):
        raise UserError(
            f"{rank.world_size} ranks do not divide by --tensor-model-parallel-size {tp} times "
            f"--pipeline-model-parallel-size {pp}"
        )
    try:
        plan = uniform_plan(
            num_layers=frame.num_layers,
            tp=tp,
            pp=pp,
            dp=rank.world_size // (tp * pp),
            micro_batches=frame.micro_batches,
            virtual=virtual,
            devices_per_node=rank.local_world_size,
        )
    except PlanError as error:
        raise UserError(f"--resilience: {error}") from error
    return replace(plan, devices=frame.devices)


def without(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """A command line without some flags and their values."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
            continue
        skip = word in flags
        if not skip and not word.startswith(tuple(f"{flag}=" for flag in flags)):
            kept.append(word)
    return kept


def _numbers(words: Sequence[str], flags: Mapping[str, int | None]) -> dict[str, int]:
    """Values of a few flags, each with its default."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = arguments.refuse  # type: ignore[method-assign]
    for flag, default in flags.items():
        parser.add_argument(flag, type=int, default=default)
    known, _ = parser.parse_known_args(list(words))
    return vars(known)


def _global_batches(words: Sequence[str]) -> list[tuple[str, int]]:
    """Every size that the global batch will have, and the flag that says so."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = arguments.refuse  # type: ignore[method-assign]
    parser.add_argument(flag := "--step-batch-size-schedule", default=None)
    known, _ = parser.parse_known_args(list(words))
    if known.step_batch_size_schedule is not None:
        return [(flag, size) for size in sizes_of(known.step_batch_size_schedule)]
    size = _numbers(words, {"--global-batch-size": None})["global_batch_size"]
    if not size or size < 1:
        raise UserError("--resilience needs --global-batch-size")
    return [("--global-batch-size", size)]


def _frame(words: Sequence[str], rank: RankEnvironment) -> Frame:
    """What a plan has to fit, from the few flags that say so."""
    found = _numbers(words, dict.fromkeys(("--num-layers", "--micro-batch-size")))
    for name, value in found.items():
        if not value or value < 1:
            raise UserError(f"--resilience needs --{name.replace('_', '-')}")
    num_layers, micro_batch = found.values()
    sizes = _global_batches(words)
    for flag, size in sizes:
        if size % micro_batch:
            raise UserError(f"{flag} {size} is not a multiple of --micro-batch-size {micro_batch}")
    return Frame(
        num_layers=num_layers,
        micro_batches=max(size for _, size in sizes) // micro_batch,
        devices=tuple(
            Device(rank=number, node=number // rank.local_world_size)
            for number in range(rank.world_size)
        ),
    )
