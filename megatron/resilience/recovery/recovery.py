"""Goes on when other ranks are lost: arrive, learn what to run, change the layout, do it again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from megatron.resilience.executor.change import Cause, Change
from megatron.resilience.executor.guard import Figures, SpoiledError
from megatron.resilience.executor.manifest import exchange_texts
from megatron.resilience.executor.modules import ModuleFactory
from megatron.resilience.executor.replay import replay, share
from megatron.resilience.executor.transition import Phases, StateLostError
from megatron.resilience.executor.world import World
from megatron.resilience.recovery.birth import AbortedError, check
from megatron.resilience.recovery.copies import Copies
from megatron.resilience.recovery.journal import Journal
from megatron.resilience.recovery.last import leave_saved
from megatron.resilience.recovery.loop_state import LoopState
from megatron.resilience.recovery.member import Member, StoppedError, SupersededError
from megatron.resilience.recovery.pace import Pace
from megatron.resilience.recovery.shards import Shards
from megatron.resilience.upstream.arguments import current_args
from resihp_ext.control import messages as say
from resihp_ext.errors import EXIT_OK, EXIT_REQUEUE
from resihp_ext.plan.plan import Plan

if TYPE_CHECKING:
    from megatron.resilience.executor.executor import Executor

logger = logging.getLogger(__name__)

VERDICT_S = 10.0
"""How long an error of the network waits for word of who is lost."""
OTHER_S = 0.5
"""The same for any other error: most are this rank's own."""
STORE_TIMEOUT = timedelta(seconds=60)
BETWEEN_STEPS = frozenset({"checkpoint", "evaluation"})
"""Stretches that are phases of their own for faults on purpose."""


class Recovery:
    """The guard of a job that survives its ranks."""

    def __init__(
        self,
        executor: Executor,
        member: Member,
        pace: Pace,
        factory: ModuleFactory,
        journal: Journal,
        copies: Copies,
        shards: Shards,
        meeting_place: tuple[str, int],
    ) -> None:
        """Prepares the guard.

        Args:
            meeting_place: Address and port of the store in the launcher.
        """
        self._executor = executor
        self.member = member
        self._pace = pace
        self._factory = factory
        self._journal = journal
        journal.begins(executor.plan)
        self._address, self._port = meeting_place
        self.done = 0
        """Stretches of work that this rank has finished."""
        self._result: Figures = ()
        self._attempting = False
        self.has_changed = False
        """Whether the coordinator has had a word in the layout: a timetable is out of date then."""
        self.strike: Callable[[str, int], None] = lambda _phase, _micro_batch: None
        """Told of every phase; for faults on purpose."""
        executor.meeting_place = self._open_store
        self.copies = copies
        executor.copies = copies
        executor.restore, executor.saved = self._restore, shards.saved
        self._shards = shards
        self.loop: LoopState | None = None
        """What the training loop of this rank keeps."""
        self._ends = False

    @property
    def plan(self) -> Plan:
        """What runs now."""
        return self._executor.plan

    @property
    def world(self) -> World:
        """Who runs it."""
        return self._executor.world

    def recovered_s(self) -> float | None:
        """Seconds of a recovery that is over and was not asked for yet: from the loss until the
        next plan ran."""
        found, self._journal.recovered_s = self._journal.recovered_s, None
        return found

    def pace_step(self, step: int) -> None:
        """Says which step begins, counted from 1."""
        self._pace.step = step

    # The guard

    def run(
        self,
        phase: str,
        attempt: Callable[[], Figures],
        *,
        ends: bool = True,
        late: Callable[[Figures], None] | None = None,
        redo: bool = True,
    ) -> Figures:
        """Attempts a stretch of work until it is done."""
        started_s = time.perf_counter()
        again = False
        while True:
            self._pace.enter(phase)
            if phase in BETWEEN_STEPS:
                self.strike(phase, 0)
            begun_s = time.perf_counter()
            try:
                found = self._attempt(attempt)
            except Exception as error:  # noqa: BLE001 - most failures of others look like our own
                taken = self._recover(error, phase, late if ends else None)
                if taken is not None:
                    return taken
                if not redo:
                    return self._finish(())
                again = True
                continue
            if again:
                self._journal.repeated(time.perf_counter() - begun_s, ends=ends)
            if ends:
                self._journal.paced(phase, time.perf_counter() - started_s)
                self._finish(found)
            return found

    def aside(self, phase: str, attempt: Callable[[], Figures]) -> bool:
        """Attempts what only some members do, between two steps; it is not repeated.

        Returns:
            Whether it was done; if not, this rank has recovered from the loss of others.
        """
        try:
            self._attempt(attempt)
        except Exception as error:  # noqa: BLE001 - as in :meth:`run`
            self._recover(error, phase, None)
            return False
        return True

    def look(self, phase: str, micro_batch: int = 0, *, waiting: bool = False) -> None:
        """Says what comes next; inside an attempt, raises if it must not begin."""
        self._pace.enter(phase, micro_batch, waiting=waiting)
        self.strike(phase, micro_batch)
        if self._attempting:
            check(self.member.abort)

    def _attempt(self, attempt: Callable[[], Figures]) -> Figures:
        self._attempting = True
        try:
            check(self.member.abort)
            return attempt()
        finally:
            self._attempting = False

    def _finish(self, result: Figures) -> Figures:
        self.done, self._result = self.done + 1, result
        return result

    # The way back

    def _recover(
        self, error: Exception, phase: str, late: Callable[[Figures], None] | None
    ) -> Figures | None:
        """Until a plan of the survivors runs.

        Returns:
            What others had already finished and this rank has taken from them, if so.
        """
        phases = Phases()
        taken: Figures | None = None
        target = -1
        self.copies.drop_pending()
        while True:
            self._await_verdict(error)
            self._pace.enter("recovery", waiting=True)
            try:
                view, go = self._gather(phase, phases)
                if go.region > self.done:
                    taken = self._take(go, late)
                target = max(target, self._updates)
                self.strike("recovery", 0)
                if go.last:
                    self._leave(view, go, phases)
                self._rebuild(view, go, phases)
                self._catch_up(target)
            except StoppedError:
                raise
            except StateLostError as lost:
                raise StoppedError(EXIT_REQUEUE, str(lost)) from lost
            except Exception as next_error:  # noqa: BLE001 - as above
                error = next_error
                continue
            return taken

    def _await_verdict(self, error: Exception) -> None:
        """Raises the error, unless it comes of a failure elsewhere."""
        if isinstance(error, SupersededError):
            return
        network = isinstance(error, AbortedError | SpoiledError) or _of_network(error)
        logger.debug("broken off", exc_info=error)
        if network and not self.member.abort.raised:
            self.member.tell(
                say.Troubled(rank=self.member.rank, epoch=self.member.epoch, text=str(error)[:1000])
            )
        if not self.member.newer_view(VERDICT_S if network else OTHER_S):
            raise error

    def _gather(self, phase: str, phases: Phases) -> tuple[say.View, say.Go]:
        """Meets the other survivors at the coordinator."""
        view = self.member.enter_view()
        self._journal.lost(view, heard_s=self.member.heard_s, phases=phases)
        with phases("gather"):
            self.member.tell(
                say.Arrived(
                    rank=self.member.rank,
                    epoch=view.epoch,
                    region=self.done,
                    result=self._result,
                    versions=tuple(self._executor.held),
                    phase=phase,
                )
            )
            return view, self.member.wait_for_go()

    def _take(self, go: say.Go, late: Callable[[Figures], None] | None) -> Figures:
        """Ends this rank's stretch with what the others have found."""
        if late is not None:
            late(go.result)
        return self._finish(go.result)

    def _rebuild(self, view: say.View, go: say.Go, phases: Phases) -> None:
        """Changes over to the plan of the survivors, in a world of theirs."""
        self.member.abort.forget()
        if self.member.newer_view(0.0):
            raise SupersededError("a newer epoch has begun")
        plan = Plan.from_json(go.plan)
        cause = Cause(
            reason=go.reason,
            world=World(members=view.members, epoch=view.epoch),
            source=go.version if go.whole else None,
            lost=not go.whole,
            torn=True,
        )
        self._change(plan, cause, phases)

    def _leave(self, view: say.View, go: say.Go, phases: Phases) -> None:
        """Ends this rank, after the survivors have saved what they hold.

        Raises:
            StoppedError: always.
        """
        self._ends = True
        self._pace.enter("checkpoint", waiting=True)
        leave_saved(
            self._executor,
            self._shards,
            self.loop,
            go,
            lambda: self._rebuild(view, go, phases),
        )

    def _restore(self, models: list[torch.nn.Module]) -> tuple[int, str]:
        """Loads what only files have."""
        if self._ends:
            raise StateLostError("the survivors do not hold the whole state")
        self.member.tell(say.Loading(rank=self.member.rank, epoch=self.member.epoch))
        return self._shards.restore(models)

    def take_up(self, loop: LoopState | None, *, newcomer: bool) -> None:
        """Carries out the proposal that all have agreed to; collective over its members.

        Raises:
            StoppedError: this rank is not among them.
        """
        self._pace.enter("change", waiting=True)
        proposal = self.member.take_proposal()
        assert proposal is not None
        assert loop is not None, "the training loop has begun"
        rank = self.member.rank
        if rank not in proposal.members:
            raise StoppedError(EXIT_OK, f"rank {rank} is drained")
        # Newcomers know nothing of the plans before.
        veterans = {*self.world.members} & {*proposal.members}
        self._journal.writes = not newcomer and rank == min(veterans)
        cause = Cause(
            reason=proposal.reason,
            world=World(members=proposal.members, epoch=proposal.epoch),
            newcomer=newcomer,
            joint=bool({*proposal.members} - {*self.world.members}) or newcomer,
        )
        try:
            self.member.abort.forget()
            self._change(Plan.from_json(proposal.plan), cause, Phases())
            # The lowest of those who were there before speaks.
            mine = "" if newcomer else loop.told(done=self.done)
            told = exchange_texts(mine, self._executor.device)
            if newcomer:
                self.done = loop.take(next(filter(None, told)))
        except Exception as error:
            if newcomer:
                raise
            self._recover(error, "change", None)

    def _change(self, plan: Plan, cause: Cause, phases: Phases) -> None:
        step = int(current_args().curr_iteration)
        executor = self._executor
        change = Change(executor, plan, executor.models, step, cause=cause, phases=phases)
        self._attempting = True
        try:
            receipt = change.run(self._factory)
        finally:
            self._attempting = False
        self.has_changed = True
        self._journal.changed(plan, receipt)
        self.member.tell(
            say.Adopted(
                rank=self.member.rank,
                epoch=self.member.epoch,
                version=plan.version,
                took_s=receipt["total_s"],
            )
        )

    @property
    def _updates(self) -> int:
        """Updates done in the state of this rank."""
        optimizer = self._executor.optimizer
        return 0 if optimizer is None else optimizer.steps

    def _catch_up(self, target: int) -> None:
        """Does again what an older state lacks; a failure meanwhile is like any other."""
        begun_s, first = time.perf_counter(), self._updates
        if first < target:
            share(self._executor, first, target)
        while self._updates < target:
            replay(self._executor)
        if first < target:
            self._journal.caught_up(target - first, time.perf_counter() - begun_s)

    def _open_store(self) -> Any:
        """A connection of its own for every epoch, so that it can be cut."""
        with self.member.abort.watching():
            store = distributed.TCPStore(
                self._address, self._port, is_master=False, timeout=STORE_TIMEOUT
            )
        check(self.member.abort)
        return store


def _of_network(error: Exception) -> bool:
    """Whether an error looks like one of a lost connection: torch has types for few of them."""
    if isinstance(error, distributed.DistError | ConnectionError | TimeoutError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(
        word in text for word in ("gloo", "connection", "nccl", "timed out", "socket", "peer")
    )
