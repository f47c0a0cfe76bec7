"""Plays this rank's part of a pass: all micro-batches of a global batch, from its beginning."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

import torch
from megatron.core.utils import get_model_config

from megatron.resilience.emulation.pacer import Pacer
from megatron.resilience.executor.groups import GroupPool
from megatron.resilience.executor.migration import Migrations
from megatron.resilience.executor.outbox import Holds
from megatron.resilience.executor.place import Seat
from megatron.resilience.executor.runtime import Look, Step
from megatron.resilience.executor.wire import Boundary, Traffic, Wire
from megatron.resilience.timing.clock import StepClock
from megatron.resilience.upstream.stream import Stream
from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.check import checked
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import one_forward_one_backward

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One call of the training loop for all micro-batches of a global batch; can be repeated."""

    forward_step_func: Callable[..., Any]
    stream: Stream
    position: int
    """Samples before the global batch."""
    micro_batches: int
    seq_length: int
    micro_batch_size: int
    forward_only: bool
    collect_non_loss_data: bool
    counts: bool = True
    """Whether its samples are to be recorded."""

    @classmethod
    def called(cls, data_iterator: Any, **fields: Any) -> Self:
        """What upstream's loop asks for, from where its data stands."""
        stream = _stream(data_iterator)
        return cls(stream=stream, position=stream.position, **fields)


class Player:
    """Runs passes under one plan after the other."""

    def __init__(self, traffic: Traffic, device: torch.device) -> None:
        """Prepares a player.

        Args:
            traffic: Counts what is sent over stage boundaries.
            device: Where tensors live that the backend moves.
        """
        self._traffic = traffic
        self._device = device
        self.pacer: Pacer | None = None
        """Of an emulated device."""
        self.holds: Holds | None = None
        """Of slow links."""
        self._programs: dict[tuple[int, bool], tuple[Plan, Program]] = {}

    def forget(self) -> None:
        """Another plan begins."""
        self._programs.clear()

    def paced(self, plan: Plan, seat: Seat, kind: Kind) -> AbstractContextManager[None]:
        """Around what is done for all micro-batches together: lets it take longer than it does."""
        if self.pacer is None or not seat.chunks:
            return nullcontext()
        return self.pacer.pace(plan, seat.chunks[0], Action(kind=kind))

    def figures(self) -> dict[str, Any]:
        """How well this rank was emulated, if it was."""
        if self.pacer is None:
            return {}
        if (complaint := self.pacer.account.complaint()) is not None:
            logger.warning("%s", complaint)
        return {"emulation": asdict(self.pacer.account)}

    def play(
        self,
        work: Pass,
        *,
        plan: Plan,
        seat: Seat,
        pool: GroupPool,
        models: Sequence[torch.nn.Module],
        look: Look,
        clock: StepClock,
        migrations: Migrations,
    ) -> Step:
        """Runs this rank's actions of a pass, from its beginning.

        Args:
            look: Told before every action what it is; may stop the pass.
            clock: Times every action.
            migrations: Lets micro-batches of training passes move.
        """
        plan, program = self._program(plan, work)
        host = seat.chunks[0] if seat.chunks else None
        course = None
        if not work.forward_only:
            course = migrations.begin(
                plan,
                program,
                host,
                speaks=seat.tp_rank == 0,
                tidies=seat.rank == min(pool.world.members),
            )
        config = get_model_config(models[0])
        work.stream.go_to(work.position)
        step = Step(
            plan=plan,
            wire=Wire(
                plan=plan,
                seat=seat,
                pool=pool,
                sequence_parallel=config.sequence_parallel,
                traffic=self._traffic,
                stamps=self.pacer,
                holds=self.holds,
            ),
            boundary=self._boundary(config, work),
            models=models,
            chunks=seat.chunks,
            forward_step_func=work.forward_step_func,
            fetch=work.stream.micro_batch,
            look=look,
            clock=clock,
            pacer=self.pacer,
            course=course,
            forward_only=work.forward_only,
            collect_non_loss_data=work.collect_non_loss_data,
        )
        step.run(() if host is None else program.actions(host))
        work.stream.advance(work.micro_batches)
        return step

    def _program(self, plan: Plan, work: Pass) -> tuple[Plan, Program]:
        """For a number of micro-batches: the plan's routes, repeated."""
        key = work.micro_batches, work.forward_only
        if key not in self._programs:
            routes = tuple(plan.routes[m % plan.micro_batches] for m in range(work.micro_batches))
            whole = replace(plan, routes=routes)
            program = one_forward_one_backward(whole, forward_only=work.forward_only)
            checked(program, whole, forward_only=work.forward_only)
            self._programs[key] = whole, program
        return self._programs[key]

    def _boundary(self, config: Any, work: Pass) -> Boundary:
        return Boundary(
            rows=work.seq_length,
            samples=work.micro_batch_size,
            hidden=config.hidden_size,
            dtype=config.pipeline_dtype or config.params_dtype,
            device=self._device,
        )


def _stream(data_iterator: Any) -> Stream:
    """The stream behind upstream's wrappers; chunks of a rank have one each over the same data."""
    one = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    stream = getattr(one, "iterable", one)
    assert isinstance(stream, Stream)
    return stream
