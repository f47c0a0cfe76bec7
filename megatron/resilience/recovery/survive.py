"""Puts together what lets one rank of a job survive the others, around its executor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.resilience.checkpoint.verify import Level
from megatron.resilience.device.co_kernel import CoKernel
from megatron.resilience.executor.executor import Executor
from megatron.resilience.executor.modules import ModuleFactory
from megatron.resilience.faults.config import JobFaults
from megatron.resilience.faults.inject import Injector
from megatron.resilience.faults.register import register
from megatron.resilience.faults.slowing import Brakes
from megatron.resilience.patches.registry import PatchSet
from megatron.resilience.recovery.abort import Abort
from megatron.resilience.recovery.birth import guarded_birth
from megatron.resilience.recovery.boundary import Boundary
from megatron.resilience.recovery.config import RecoveryConfig
from megatron.resilience.recovery.copies import Copies
from megatron.resilience.recovery.journal import Journal
from megatron.resilience.recovery.loop_state import LoopState
from megatron.resilience.recovery.member import Member
from megatron.resilience.recovery.notes import Notes
from megatron.resilience.recovery.pace import Pace
from megatron.resilience.recovery.recovery import Recovery
from megatron.resilience.recovery.shards import Shards
from megatron.resilience.timing.config import TimingConfig
from megatron.resilience.validation.begin import validator_of
from resihp_ext.control.client import WorkerLink
from resihp_ext.control.messages import Hello, Leaving, Timed
from resihp_ext.control.pace_messages import MOST_ACTIONS
from resihp_ext.control.worker_environment import WorkerEnvironment
from resihp_ext.detector.timed import RankStep
from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import EXIT_OK, EXIT_REQUEUE
from resihp_ext.events import EventLog

logger = logging.getLogger(__name__)

_PHASES = {"recv": "p2p", "send": "p2p", "gather": "recovery", "change": "recovery"}
"""How the language of faults calls a phase, where it has another name here."""


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a survivor needs to know of its job."""

    rank: RankEnvironment
    agent: WorkerEnvironment
    folder: Path
    """``--resilience-dir``."""
    events: EventLog | None
    faults: JobFaults
    config: RecoveryConfig
    describe: Callable[[], str]
    """JSON of what the coordinator needs to plan."""
    also: Callable[[list[torch.nn.Module]], None] | None
    """A further change of plans that is due by itself."""
    timing: TimingConfig
    """Whether the coordinator looks for slow devices, and has them measured."""
    level: Level
    """How thoroughly checkpoints are verified."""
    initialise: Callable[[list[torch.nn.Module]], object]
    """Draws the initial weights of modules."""


class Survivor:
    """The resilient side of one rank; the owner calls :meth:`leave` or :meth:`close`."""

    def __init__(
        self,
        executor: Executor,
        factory: ModuleFactory,
        patches: PatchSet,
        around: Surroundings,
    ) -> None:
        """Connects to the agent.

        Raises:
            ResiHPError: there is no agent of this job.
        """
        rank, agent = around.rank.rank, around.agent
        self._executor = executor
        self._rank = rank
        self._newcomer = agent.joins
        self._pace = Pace(rank)
        self._member = Member(rank, Abort())
        self._link = WorkerLink(
            agent.socket,
            agent.token,
            rank,
            on_message=Notes(around.events, self._member.hear),
            progress=self._pace.told,
            on_lost=_agent_is_gone,
        )
        journal = Journal(around.folder, around.events, rank)
        assert around.rank.master_addr is not None
        assert around.rank.master_port is not None
        self._shards = Shards(executor, level=around.level, initialise=around.initialise)
        self.recovery = Recovery(
            executor,
            self._member,
            self._pace,
            factory,
            journal,
            Copies(executor, around.config.memory_copy_steps),
            self._shards,
            (around.rank.master_addr, around.rank.master_port),
        )
        self._boundary = self._bound(around)
        self._arm_faults(around)
        patches.group_birth.guard = guarded_birth(self._member.abort)
        executor.guard = self.recovery
        executor.before_step = self._boundary
        executor.before_training = self._before_training
        if around.timing.detect != "off":
            executor.clock.on_step.append(self._tell_times)
        self._link.start()
        self._member.link = self._link
        self._member.tell(
            Hello(
                rank=rank,
                incarnation=agent.incarnation,
                pid=os.getpid(),
                joins=agent.joins,
            )
        )

    def _bound(self, around: Surroundings) -> Boundary:
        detects = around.timing.detect != "off"
        return Boundary(
            self.recovery,
            describe=around.describe,
            also=around.also,
            joins=around.agent.joins,
            validator=validator_of(self._executor, self._member, self.recovery)
            if detects
            else None,
            recheck_steps=around.timing.recheck_steps,
        )

    def _arm_faults(self, around: Surroundings) -> None:
        agent = around.agent
        register(
            around.folder,
            rank=self._rank,
            node=agent.node,
            incarnation=agent.incarnation,
            agent_pid=agent.agent_pid,
        )
        gpu = self._executor.device if self._executor.device.type == "cuda" else None
        self._injector = injector = Injector(
            around.faults,
            rank=self._rank,
            node=agent.node,
            folder=around.folder,
            agent_pid=agent.agent_pid,
            brakes=Brakes(
                launcher_pid=agent.agent_pid or os.getpid(),
                rank=self._rank,
                place=around.rank.local_rank,
                threads=torch.get_num_threads(),
                kernel=None if gpu is None else lambda: CoKernel(gpu),
            ),
        )
        pace = self._pace

        def strike(phase: str, micro_batch: int) -> None:
            injector.at(_PHASES.get(phase, phase), pace.step, micro_batch)

        self.recovery.strike = strike
        if around.faults.emulated is None:
            self._executor.player.holds = injector.slowing.link_hold

    def _before_training(self, scheduler: Any) -> None:
        """Megatron's training loop is about to begin, in a newcomer not at its first step."""
        self._boundary.loop = self.recovery.loop = LoopState(scheduler)
        optimizer = self._executor.optimizer
        if optimizer is not None:
            optimizer.ballot, optimizer.counted = self._boundary.ballot, self._boundary.counted
        if self._newcomer:
            self._newcomer = False
            self._pace.enter("ready", waiting=True)
            enter = self._member.wait_to_enter(self._rank)
            LoopState.begin(enter.step, enter.loop)
        else:
            self._shards.begin()

    def _tell_times(self, times: RankStep) -> None:
        """Nobody waits for these, so what is too much is left out."""
        if max(len(times.actions), len(times.micro_batches)) <= MOST_ACTIONS:
            self._member.offer(Timed(rank=self._rank, times=times))

    def meet(self) -> None:
        """Waits for all members: none may close its connections under another's last message."""

        def attempt() -> tuple[float, ...]:
            torch.distributed.barrier()
            return ()

        self.recovery.run("end", attempt)

    def leave(self, exit_code: int = EXIT_OK, cause: str = "") -> None:
        """Says that this worker ends on purpose."""
        message = Leaving(rank=self._rank, exit_code=exit_code)
        if exit_code:
            newest = self._shards.newest[:1000]
            message = Leaving(
                rank=self._rank, exit_code=exit_code, cause=cause[:1000], checkpoint=newest
            )
        self._member.tell(message)
        self.close()

    def close(self) -> None:
        """Ends the link, and faults that last."""
        self._injector.close()
        self._link.close()


def _agent_is_gone() -> None:
    """Without its agent a rank cannot know whether it is still counted: it must not train on."""
    logger.error("the agent of this node is gone: this rank ends")
    os._exit(EXIT_REQUEUE)
