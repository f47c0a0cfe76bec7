"""One rank's side of a plan: what ``pretrain`` is handed in the place of Megatron's own schedule,
groups and optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
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
from megatron.resilience.executor.migration import Migrations
from megatron.resilience.executor.optimizer import (
    DomainOptimizer,
    base_optimizer,
    groups_of,
    kinds_of,
)
from megatron.resilience.executor.place import Seat
from megatron.resilience.executor.player import Pass, Player
from megatron.resilience.executor.replay import History
from megatron.resilience.executor.runtime import Step
from megatron.resilience.executor.saving import Saving
from megatron.resilience.executor.sources import KeptCopies, NoCopies
from megatron.resilience.executor.totals import lengths_here, report, summed, totals
from megatron.resilience.executor.transition import Held, StateLostError
from megatron.resilience.executor.wire import Traffic
from megatron.resilience.executor.world import World
from megatron.resilience.timing.clock import OFF, StepClock
from megatron.resilience.timing.marks import marks_for
from megatron.resilience.upstream.arguments import current_args
from megatron.resilience.upstream.common_grid import hold_nothing, refine
from megatron.resilience.upstream.ddp import free_gradients
from megatron.resilience.upstream.process_groups import collection_for, install
from resihp_ext.plan.action import Kind
from resihp_ext.plan.plan import Plan
from resihp_ext.state.keepers import Redundancy


class Executor:
    """Runs the steps of a plan on this rank.

    Attributes:
        groups: What ``pretrain`` takes as ``pg_collection``.
        traffic: Bytes sent over stage boundaries so far.
        clock: Where the time of each step goes.
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
        self.clock = StepClock(rank, marks_for(device))
        self.groups: Any = None
        self.layout: StateLayout | None = None
        self.buffers: list[DomainBuffer] = []
        self.device = device
        self.redundancy = redundancy
        self.player = Player(self.traffic, device)
        self.migrations = Migrations()
        self._fresh = True
        self.guard: Guard = NoGuard()
        self.saving = Saving(device)
        self.copies: KeptCopies = NoCopies()
        self.restore: Callable[[list[torch.nn.Module]], tuple[int, str]] = _nothing_to_restore
        """Loads the newest sound checkpoint; returns the updates done in it and what it is."""
        self.saved: Callable[[int], None] = _nothing_to_note
        """Told of the step after which a checkpoint was saved."""
        self.history = History()
        self._host: Any = None
        self._store: Any = None
        """Where the members of another world than the first one have met."""
        self.meeting_place: Callable[[], Any] | None = None
        """Opens the store for another world; default: the first one's."""
        self.models: list[torch.nn.Module] = []
        self.last: Pass | None = None
        """Of the step that runs, or ran last."""
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
        self._host = None if backend == "gloo" else dist.new_group(backend="gloo")
        self.migrations.meet(store, self.world.epoch)
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
        self.optimizer.clock = self.clock
        self.optimizer.paced = lambda: self.player.paced(self.plan, self.seat, Kind.STEP)
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
        self.player.forget()
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
        self.clock.drop()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._store = self.meeting_place()
        world.connect(
            self.seat.rank,
            backend=self._backend,
            store=self._store,
            timeout=self._timeout,
        )
        self.world = world
        self.migrations.meet(self._store, world.epoch)
        self.pool = GroupPool(world, self._timeout)
        self._host = None if self._backend == "gloo" else dist.new_group(backend="gloo")

    def tidy_store(self) -> None:
        """Ends what is left of earlier worlds, once all members are in this one."""
        if self._store is not None and self.seat.rank == min(self.world.members):
            self.world.forget_earlier(self._store)

    def host_group(self) -> Any:
        """A group of all ranks for tensors in host memory."""
        return self._host

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
        work = Pass.called(
            data_iterator,
            forward_step_func=forward_step_func,
            micro_batches=num_microbatches,
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=collect_non_loss_data,
        )
        if collect_non_loss_data:
            with self.clock.apart():
                return self._play(work).reports
        if forward_only:
            with self.clock.apart():
                found = self.guard.run("evaluation", lambda: self._evaluate(work))
            return [report(found, self.device, means=False)]
        self.aim(work)
        self._record(work)
        found = self.guard.run("step", self.make_gradients, ends=False)
        return [report(found, self.device, means=True)]

    def make_gradients(self) -> Figures:
        """Plays the last pass of a step, unless its gradients are already there; collective."""
        work = self.last
        assert work is not None
        if not self._stale:
            return self._totals_of_step
        self._restart_clock(work)
        config = get_model_config(self.models[0])
        timers = config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        for buffer in self.buffers:
            buffer.clear_gradients()
        self.before_pass()
        step = self._play(work, self.clock)
        self.guard.look("sync", waiting=True)
        with self.player.paced(self.plan, self.seat, Kind.SYNC):
            with self.clock.waiting():
                found = totals(step, self.seat, self.device)
            self._reduce_gradients(found[0] if config.calculate_per_token_loss else None)
        self.clock.end()
        if timers is not None:
            timers("forward-backward").stop()
        if work.counts:
            self.after_pass()
        self._stale, self._totals_of_step = False, found
        return found

    def _restart_clock(self, work: Pass) -> None:
        self.clock.drop()
        if work.counts:
            self.clock.restart(int(current_args().curr_iteration) + 1, self.plan.version)

    def figures(self) -> dict[str, Any]:
        """What this rank has sent and, if it was emulated, how well."""
        return {**asdict(self.traffic), **self.player.figures()}

    def aim(self, work: Pass) -> None:
        """Says what the next step is; gradients that are there are of another one."""
        self.last, self._stale = work, True

    def _record(self, work: Pass) -> None:
        optimizer = self.optimizer
        assert optimizer is not None
        step = int(current_args().curr_iteration)
        self.history.record(optimizer.steps, step, work, optimizer.settings())

    def _evaluate(self, work: Pass) -> Figures:
        step = self._play(work)
        self.guard.look("sync", waiting=True)
        return totals(step, self.seat, self.device)

    def _play(self, work: Pass, clock: StepClock = OFF) -> Step:
        return self.player.play(
            work,
            plan=self.plan,
            seat=self.seat,
            pool=self.pool,
            models=self.models,
            look=self.guard.look,
            clock=clock,
            migrations=self.migrations,
        )

    def _refresh(self, forward_only: bool) -> None:
        """Before the first step: whatever was loaded into the modules is what is trained."""
        if self._fresh and not forward_only and self.optimizer is not None:
            self.optimizer.adopt_parameters()
            self._fresh = False

    def _reduce_gradients(self, tokens: float | None) -> None:
        """Sums every domain over its owners, in the one order that all ranks follow."""
        for buffer in self.buffers:
            buffer.pack_gradients()
            if tokens is not None:
                buffer.gradient.mul_(1.0 / max(tokens, 1.0))
        waits = [buffer.reduce() for buffer in self.buffers]
        with self.clock.waiting():
            for wait in waits:
                if wait is not None:
                    wait.wait()

    def sequence_stats(self, local: torch.Tensor | None) -> tuple[float, float]:
        """Tokens and squared segment lengths of the global batch; collective.

        Args:
            local: The two sums over the micro-batches that this rank has run.
        """
        sums = lengths_here(local, self.plan, self.seat, self.device)
        tokens, squares = self.guard.run("statistics", lambda: summed(sums.clone()))
        return tokens, squares


def _nothing() -> None:
    """Nobody wants to know."""


def _nothing_to_note(_step: int) -> None:
    """Nobody keeps a list of checkpoints."""


def _nothing_to_restore(_models: list[torch.nn.Module]) -> tuple[int, str]:
    raise StateLostError(
        "a part of the state is lost with all its owners, and there is no copy of it"
    )
