"""Carries out a transition on this rank, phase by phase; collective over all live ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron.resilience.executor import move, transition
from megatron.resilience.executor.buffers import MASTER
from megatron.resilience.executor.groups import members_of
from megatron.resilience.executor.layout import StateLayout
from megatron.resilience.executor.manifest import exchange_texts
from megatron.resilience.executor.modules import ModuleFactory, forget_modules, own_memory
from megatron.resilience.executor.needs import Needs, kinds_that_travel
from megatron.resilience.executor.optimizer import kinds_of
from megatron.resilience.executor.place import Seat
from megatron.resilience.executor.sources import newest_whole
from megatron.resilience.executor.transition import Held, Moved, Phases, TransitionError
from megatron.resilience.executor.world import World
from megatron.resilience.upstream.ddp import let_go
from megatron.resilience.upstream.process_groups import install, reseat
from resihp_ext.plan.plan import Plan

if TYPE_CHECKING:
    from megatron.resilience.executor.executor import Executor


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why the layout changes, and how."""

    reason: str
    world: World | None = None
    """The processes that run the new plan, if they are others than now."""
    source: int | None = None
    """Version of the plan whose state is the source; default: the one that runs."""
    lost: bool = False
    """Whether nobody has its share of any plan's state any more."""
    torn: bool = False
    """Whether a step was broken off, so that modules may hold weights of before it."""
    newcomer: bool = False
    """Whether this rank comes to the others, with nothing of the state."""
    joint: bool = False
    """Whether there are newcomers at all."""


class Change:
    """One transition of one executor.

    The state before is kept until every rank has verified its new one: whoever is interrupted in
    between still has it, and can begin again.
    """

    def __init__(
        self,
        executor: Executor,
        plan: Plan,
        models: list[torch.nn.Module],
        step: int,
        *,
        cause: Cause,
        phases: Phases | None = None,
    ) -> None:
        """Prepares the change to ``plan``.

        Args:
            models: The training loop's own list of model chunks; its content is replaced.
            step: Steps done so far.
            phases: What led to the change, already timed.
        """
        self._executor = executor
        self._plan = plan
        self._models = models
        self._step = step
        self._cause = cause
        self._phases = phases or Phases()
        self._old_plan, self._old_seat = executor.plan, executor.seat
        optimizer = executor.optimizer
        assert optimizer is not None, "a plan changes after the optimizer is built"
        self._optimizer = optimizer
        self._rewound: int | None = None
        """Updates done in the state that was found, if it is not the newest."""
        self._found = "owners"
        """Where the state was found."""
        self._half = bool(optimizer.config.bf16)
        self._state_kinds = (MASTER, *kinds_of(optimizer.config))

    def run(self, factory: ModuleFactory) -> dict[str, Any]:
        """Changes the layout.

        Returns:
            The receipt.

        Raises:
            TransitionError: ranks do not agree on the plan, or the state is not what it was.
        """
        phase, executor = self._phases, self._executor
        if self._cause.world is not None:
            with phase("world"):
                executor.reconnect(self._cause.world)
        with phase("agree"):
            transition.agree(self._plan, executor.world.members, executor.device)
            old = self._source()
        with phase("digest"):
            before = {} if old is None else self._digests(old)
        seat = Seat.of(self._plan, executor.seat.rank)
        rebuild = self._cause.world is not None or not seat.same_modules(self._old_seat)
        with phase("groups"):
            made = executor.pool.add(members_of(self._plan, (), executor.world.members))
            reseat(executor.groups, seat, executor.pool)
            install(seat, executor.groups, executor.world)
        executor.plan, executor.seat = self._plan, seat
        with phase("modules"):
            self._modules(factory, seat, rebuild)
        with phase("layout"):
            made += self._layout()
        if old is None:
            with phase("load"):
                self._rewound, self._found = executor.restore(self._models)
            moved, new = Moved(bytes=0, lower_bound_bytes=0, messages=0), executor.state_here()
        else:
            moved, new = self._moved(old, before)
        executor.held[new.version] = new
        with phase("commit"):
            dist.barrier()
        del old
        executor.held = {new.version: new}
        with phase("release"):
            ended = executor.pool.keep(executor.wanted_groups())
            forget_modules()
            if self._cause.world is not None:
                executor.tidy_store()
        return self._receipt(moved, before, rebuild, (made, ended))

    def _moved(self, old: Held, before: dict[str, str]) -> tuple[Moved, Held]:
        """Moves the state, and proves that it is what it was."""
        moved, moving = self._move(old)
        with self._phases("verify"):
            self._refuse(moving.damaged())
            del moving
            new = self._executor.state_here()
            self._verify(before, self._digests(new))
        return moved, new

    def _source(self) -> Held | None:
        """The newest state that is left as a whole; None if only a checkpoint can have it."""
        executor, cause = self._executor, self._cause
        if cause.joint:
            return self._told_state().among(executor.world.members)
        version = self._old_plan.version if cause.source is None else cause.source
        held = None if cause.lost else executor.held[version]
        if cause.world is None:
            return held
        if held is None or held.layout.lost(executor.world.members) is not None:
            members, rank = executor.world.members, executor.seat.rank
            found = newest_whole(executor.copies, rank, members, self._told)
            if found is None:
                return None
            self._rewound, held = found
            self._found = "copies in memory"
            self._optimizer.steps = self._rewound
            return held
        masters_only = cause.torn and executor.redundancy != "replicated"
        return held.among(executor.world.members, masters_only=masters_only)

    def _told_state(self) -> Held:
        """Tells newcomers what the others hold."""
        executor, optimizer = self._executor, self._optimizer
        mine = ""
        if not self._cause.newcomer:
            held = executor.held[self._old_plan.version]
            mine = json.dumps([self._old_plan.version, optimizer.steps, held.layout.to_json()])
        told = next(filter(None, self._told(mine)))
        if not self._cause.newcomer:
            return held
        version, optimizer.steps, layout = json.loads(told)
        return Held(version=version, layout=StateLayout.from_json(layout), buffers=(), pieces=())

    def _digests(self, held: Held) -> dict[str, str]:
        executor = self._executor
        found = transition.state_digest(
            held, self._state_kinds, executor.seat.rank, executor.device
        )
        return dict(zip(self._state_kinds, found, strict=True)) | {
            "steps": str(self._optimizer.steps)
        }

    def _modules(self, factory: ModuleFactory, seat: Seat, rebuild: bool) -> None:
        if not rebuild:
            own_memory(self._models)
            return
        told = get_model_config(self._models[0])
        for model in self._models:
            let_go(model)
        if self._executor.redundancy == "replicated":
            # The new weights come from masters: the old modules are of no use any more.
            self._models.clear()
            forget_modules()
        self._models[:] = factory.build(seat, self._executor.groups, told)

    def _layout(self) -> int:
        """Who holds what from now on; empty buffers for it. Returns the groups that were made."""
        optimizer, executor = self._optimizer, self._executor
        steps, groups = optimizer.steps, [dict(group) for group in optimizer.param_groups]
        made = executor.attach(optimizer, self._models)
        optimizer.set_steps(steps)
        if self._cause.newcomer:
            return made  # the schedule sets what changes in the course of training
        for mine, theirs in zip(optimizer.param_groups, groups, strict=True):
            mine.update({key: value for key, value in theirs.items() if key != "params"})
        return made

    def _move(self, old: Held) -> tuple[Moved, move.Move]:
        phase, executor = self._phases, self._executor
        kinds = kinds_that_travel(self._state_kinds[1:], half=self._half)
        new = executor.state_here()
        with phase("transfers"):
            needs = Needs(old.layout, new.layout, kinds)
            todo = move.messages(needs.transfers(), kinds)
            stores = transition.Stores.of(old, new, kinds)
            moving = move.Move(
                todo,
                rank=executor.seat.rank,
                sources=stores.sources,
                targets=stores.targets,
                device=executor.device,
                world=executor.world,
            )
        with torch.no_grad():
            with phase("keep"):
                stores.keep()
            with phase("meet"):
                # Otherwise the move would seem to take as long as the slowest rank's way to it.
                dist.barrier()
            with phase("move"):
                moving.run()
            with phase("weights"):
                stores.derive()
        moved = Moved(
            bytes=sum(message.bytes for message in todo),
            lower_bound_bytes=needs.lower_bound_bytes(),
            messages=len(todo),
        )
        return moved, moving

    def _refuse(self, damaged: Sequence[str]) -> None:
        """Stops all ranks if anything arrived damaged at one of them."""
        told = [one for text in self._told(json.dumps(damaged)) for one in json.loads(text)]
        if told:
            more = f" (and {len(told) - 1} more)" if len(told) > 1 else ""
            raise TransitionError(f"{self._name()}: {told[0]}{more}")

    def _told(self, text: str) -> list[str]:
        return exchange_texts(text, self._executor.device)

    def _name(self) -> str:
        return f"step {self._step}, plan {self._old_plan.version} to {self._plan.version}"

    def _verify(self, before: dict[str, str], after: dict[str, str]) -> None:
        wrong = {kind: (was, after[kind]) for kind, was in before.items() if was != after[kind]}
        if wrong:
            raise TransitionError(f"{self._name()}: the state has changed: {wrong}")

    def _receipt(
        self, moved: Moved, digests: dict[str, str], rebuilt: bool, groups: tuple[int, int]
    ) -> dict[str, Any]:
        members = self._executor.world.members
        flags = zip(members, self._told(str(int(rebuilt))), strict=True)
        return transition.receipt(
            step=self._step,
            before=self._old_plan,
            after=self._plan,
            phases=self._phases,
            moved=moved,
            digests=digests,
            rebuilt=[rank for rank, flag in flags if flag == "1"],
            groups=groups,
            reason=self._cause.reason,
            rewound=self._rewound,
            source=self._found,
        )
