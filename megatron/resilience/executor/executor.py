"""One rank's side of a plan: what ``pretrain`` is handed in the place of Megatron's own schedule,
groups and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config, unwrap_model

from megatron.resilience.executor.buffers import DomainBuffer
from megatron.resilience.executor.groups import GroupPool, Members, members_of
from megatron.resilience.executor.guard import Figures, Guard, NoGuard
from megatron.resilience.executor.layout import StateLayout
from megatron.resilience.executor.manifest import pieces_of
from megatron.resilience.executor.optimizer import (
    DomainOptimizer,
    base_optimizer,
    groups_of,
    kinds_of,
)
from megatron.resilience.executor.place import Seat
from megatron.resilience.executor.runtime import Step
from megatron.resilience.executor.transition import Held
from megatron.resilience.executor.wire import Boundary, Traffic, Wire
from megatron.resilience.executor.world import World
from megatron.resilience.upstream.common_grid import hold_nothing, refine
from megatron.resilience.upstream.ddp import free_gradients
from megatron.resilience.upstream.process_groups import collection_for, install
from megatron.resilience.upstream.stream import Stream
from resihp_ext.plan.action import Action
from resihp_ext.plan.check import checked
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.state.keepers import Redundancy

LOSSES = ("lm loss",)
"""Keys of what the forward step reports: a sum and the number of tokens of each."""


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


class Executor:
    """Runs the steps of a plan on this rank.

    Attributes:
        groups: What ``pretrain`` takes as ``pg_collection``.
        traffic: Bytes sent over stage boundaries so far.
        before_training: Called with Megatron's parameter scheduler before the training loop.
        before_step: Called with the training loop's list of model chunks before every step; may
            change the plan.
        before_pass: Called before the micro-batches of a step, each time that they are run.
        after_pass: Called when their gradients are reduced, so before anybody can have stepped.
    """

    def __init__(
        self, plan: Plan, rank: int, *, device: torch.device, redundancy: Redundancy
    ) -> None:
        """Prepares a rank; :meth:`join` connects it.

        Args:
            device: Where tensors live that the backend moves.
            redundancy: Who keeps the optimizer's state.
        """
        self.plan = plan
        self.seat = Seat.of(plan, rank)
        self.traffic = Traffic()
        self.groups: Any = None
        self.layout: StateLayout | None = None
        self.buffers: list[DomainBuffer] = []
        self.device = device
        self.redundancy = redundancy
        self._programs: dict[tuple[int, bool], tuple[Plan, tuple[Action, ...]]] = {}
        self._fresh = True
        self.guard: Guard = NoGuard()
        self.meeting_place: Callable[[], Any] | None = None
        """Opens the store for another world; default: the first one's."""
        self.models: list[torch.nn.Module] = []
        self._last: Pass | None = None
        self._stale = True
        self._totals_of_step: Figures = ()
        self.held: dict[int, Held] = {}
        """By the version of the plan; two while a change is not done everywhere."""
        self._overrides: Any = None
        self.before_step: Callable[[list[torch.nn.Module]], None] = lambda _models: None
        self.before_pass: Callable[[], None] = _nothing
        self.after_pass: Callable[[], None] = _nothing
        self.before_training: Callable[[Any], None] = lambda _scheduler: None
        self.optimizer: DomainOptimizer | None = None

    def join(self, members: Sequence[int], *, backend: str, store: Any, timeout: timedelta) -> None:
        """Connects all ranks and makes the groups of the plan's stages; collective.

        Args:
            members: Global ranks, ascending.
            store: Where they meet.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self._backend, self._timeout = backend, timeout
        if self.meeting_place is None:
            self.meeting_place = lambda: store
        self.world = World(members=tuple(members))
        self.world.connect(self.seat.rank, backend=backend, store=store, timeout=timeout)
        self.pool = GroupPool(self.world, timeout)
        self.pool.add(members_of(self.plan, (), self.world.members))
        self.groups = collection_for(self.seat, self.pool)
        install(self.seat, self.groups, self.world)

    def build_optimizer(
        self, config: Any, models: Sequence[torch.nn.Module], overrides: Any
    ) -> DomainOptimizer:
        """Builds this rank's optimizer; collective."""
        self._overrides = overrides
        self.optimizer = DomainOptimizer(config, self.device)
        self.optimizer.sharded = self.redundancy != "replicated"
        self.optimizer.guard, self.optimizer.ready = self.guard, self.make_gradients
        self.attach(self.optimizer, models)
        self.held = {self.plan.version: self.state_here()}
        return self.optimizer

    def attach(self, optimizer: DomainOptimizer, models: Sequence[torch.nn.Module]) -> int:
        """Finds out who holds what, and gives the optimizer empty buffers for it; collective.

        Returns:
            How many groups were made.
        """
        config, rank = optimizer.config, self.seat.rank
        pieces = pieces_of(models, self.seat.tp)
        for model in unwrap_model(list(models)):
            if self.seat.chunks:
                refine(model, self._common_degree() // self.seat.tp)
            else:
                hold_nothing(model)
        base = base_optimizer(config, models, self._overrides, self.groups)
        self.layout = StateLayout.exchanged(
            pieces,
            groups_of(base, pieces),
            ranks=self.world.members,
            redundancy=self.redundancy,
            nodes={one.rank: one.node for one in self.plan.devices if one.alive},
            device=self.device,
        )
        made = self.pool.add(self.wanted_groups())
        self.buffers = [
            DomainBuffer(
                domain,
                keepers,
                rank=rank,
                group=self.pool[keepers.members],
                pieces=pieces,
                kinds=kinds_of(config),
                device=self.device,
            )
            for domain, keepers in zip(self.layout.domains, self.layout.keepers, strict=True)
            if rank in keepers.members
        ]
        optimizer.attach(base, self.buffers, self.layout.groups, pieces)
        self._share_memory(models)
        self._programs.clear()
        self._stale = True
        return made

    def _share_memory(self, models: Sequence[torch.nn.Module]) -> None:
        shared = {id(one) for buffer in self.buffers for one in buffer.share_memory()}
        for model in models:
            free_gradients(model, shared)

    def state_here(self) -> Held:
        """What this rank holds under its plan."""
        assert self.layout is not None
        assert self.optimizer is not None
        return Held(
            version=self.plan.version,
            layout=self.layout,
            buffers=self.buffers,
            pieces=self.optimizer.pieces,
        )

    def reconnect(self, world: World) -> None:
        """Connects this rank with the members of another world; collective over them.

        All groups end with the world before.
        """
        assert self.meeting_place is not None
        if dist.is_initialized():
            dist.destroy_process_group()
        world.connect(
            self.seat.rank,
            backend=self._backend,
            store=self.meeting_place(),
            timeout=self._timeout,
        )
        self.world = world
        self.pool = GroupPool(world, self._timeout)

    def wanted_groups(self) -> tuple[Members, ...]:
        """Every group that the plan and its sync domains need."""
        assert self.layout is not None
        return members_of(self.plan, self.layout.keepers, self.world.members)

    def _common_degree(self) -> int:
        """Least common multiple of all tensor-parallel degrees."""
        return math.lcm(*(stage.tp for one in self.plan.replicas for stage in one.stages))

    def forward_backward(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: list[torch.nn.Module] | torch.nn.Module,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **_unused: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Stands for Megatron's schedules; gradients are reduced when it returns.

        Returns:
            One report with the loss of the whole global batch, on every rank.
        """
        self.models = model if isinstance(model, list) else [model]
        self._refresh(forward_only)
        if not forward_only:
            self.before_step(self.models)
        stream = _stream(data_iterator)
        work = Pass(
            forward_step_func=forward_step_func,
            stream=stream,
            position=stream.position,
            micro_batches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
        )
        if collect_non_loss_data:
            return self._play(work).reports
        if forward_only:
            totals = self.guard.run("evaluation", lambda: self._evaluate(work))
            return [self._report(totals, forward_only)]
        self._last = work
        self._stale = True
        return [self._report(self.guard.run("step", self.make_gradients, ends=False), False)]

    def make_gradients(self) -> Figures:
        """Plays the last pass of a step, unless its gradients are already there; collective."""
        work = self._last
        assert work is not None
        if not self._stale:
            return self._totals_of_step
        config = get_model_config(self.models[0])
        timers = config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        for buffer in self.buffers:
            buffer.clear_gradients()
        self.before_pass()
        step = self._play(work)
        self.guard.look("sync", waiting=True)
        totals = self._totals(step)
        self._reduce_gradients(totals[0] if config.calculate_per_token_loss else None)
        if timers is not None:
            timers("forward-backward").stop()
        if work.counts:
            self.after_pass()
        self._stale, self._totals_of_step = False, totals
        return totals

    def _evaluate(self, work: Pass) -> Figures:
        step = self._play(work)
        self.guard.look("sync", waiting=True)
        return self._totals(step)

    def _play(self, work: Pass) -> Step:
        """Runs this rank's actions of a pass, from its beginning."""
        plan, actions = self._program(work.micro_batches, work.forward_only)
        config = get_model_config(self.models[0])
        work.stream.go_to(work.position)
        step = Step(
            plan=plan,
            wire=self._wire(plan, config),
            boundary=self._boundary(config, work.seq_length, work.micro_batch_size),
            models=self.models,
            chunks=self.seat.chunks,
            forward_step_func=work.forward_step_func,
            fetch=work.stream.micro_batch,
            look=self.guard.look,
            forward_only=work.forward_only,
            collect_non_loss_data=work.collect_non_loss_data,
        )
        step.run(actions)
        work.stream.advance(work.micro_batches)
        return step

    def _refresh(self, forward_only: bool) -> None:
        """Before the first step: whatever was loaded into the modules is what is trained."""
        if self._fresh and not forward_only and self.optimizer is not None:
            self.optimizer.adopt_parameters()
            self._fresh = False

    def _program(self, micro_batches: int, forward_only: bool) -> tuple[Plan, tuple[Action, ...]]:
        """This rank's actions for a number of micro-batches: the plan's routes, repeated."""
        key = micro_batches, forward_only
        if key not in self._programs:
            routes = tuple(
                self.plan.routes[m % self.plan.micro_batches] for m in range(micro_batches)
            )
            plan = replace(self.plan, routes=routes)
            program = one_forward_one_backward(plan, forward_only=forward_only)
            checked(program, plan, forward_only=forward_only)
            actions = program.actions(self.seat.chunks[0]) if self.seat.chunks else ()
            self._programs[key] = plan, actions
        return self._programs[key]

    def _wire(self, plan: Plan, config: Any) -> Wire:
        return Wire(
            plan=plan,
            seat=self.seat,
            pool=self.pool,
            sequence_parallel=config.sequence_parallel,
            traffic=self.traffic,
        )

    def _boundary(self, config: Any, seq_length: int, micro_batch_size: int) -> Boundary:
        return Boundary(
            rows=seq_length,
            samples=micro_batch_size,
            hidden=config.hidden_size,
            dtype=config.pipeline_dtype or config.params_dtype,
            device=self.device,
        )

    def _totals(self, step: Step) -> Figures:
        """Sums over all stage instances: tokens, then loss and tokens of each reported key."""
        sums = torch.zeros(1 + 2 * len(LOSSES), dtype=torch.float64, device=self.device)
        # All ranks of a tensor-parallel group report the same.
        if self.seat.tp_rank == 0:
            sums[0] += step.tokens
            for report in step.reports:
                for k, key in enumerate(LOSSES):
                    sums[1 + 2 * k : 3 + 2 * k] += report[key].double()
        dist.all_reduce(sums)
        return tuple(sums.tolist())

    def _report(self, totals: Figures, forward_only: bool) -> dict[str, torch.Tensor]:
        """Means of a training step; of an evaluation sum and tokens, which upstream adds up."""
        sums = torch.tensor(totals, dtype=torch.float64, device=self.device)
        pairs = {key: sums[1 + 2 * k : 3 + 2 * k] for k, key in enumerate(LOSSES)}
        if forward_only:
            return {key: pair.float() for key, pair in pairs.items()}
        return {key: (pair[0] / pair[1].clamp(min=1)).float() for key, pair in pairs.items()}

    def _reduce_gradients(self, tokens: float | None) -> None:
        """Sums every domain over its owners, in the one order that all ranks follow."""
        for buffer in self.buffers:
            buffer.pack_gradients()
            if tokens is not None:
                buffer.gradient.mul_(1.0 / max(tokens, 1.0))
        waits = [buffer.reduce() for buffer in self.buffers]
        for wait in waits:
            if wait is not None:
                wait.wait()

    def sequence_stats(self, local: torch.Tensor | None) -> tuple[float, float]:
        """Tokens and squared segment lengths of the global batch; collective.

        Args:
            local: The two sums over the micro-batches that this rank has run.
        """
        sums = torch.zeros(2, dtype=torch.float64, device=self.device)
        ends = [
            one
            for one in self.seat.chunks
            if self.plan.stage(one).layers[1] == self.plan.num_layers
        ]
        if ends and self.seat.tp_rank == 0 and local is not None:
            sums += local / len(self.seat.chunks)
        tokens, squares = self.guard.run("statistics", lambda: _summed(sums.clone()))
        return tokens, squares


def _nothing() -> None:
    """Nobody wants to know."""


def _summed(sums: torch.Tensor) -> Figures:
    dist.all_reduce(sums)
    return tuple(sums.tolist())


def _stream(data_iterator: Any) -> Stream:
    """The stream behind upstream's wrappers; chunks of a rank have one each over the same data."""
    one = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    stream = getattr(one, "iterable", one)
    assert isinstance(stream, Stream)
    return stream
