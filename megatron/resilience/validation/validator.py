"""When this rank measures: at a boundary between steps on which all members have agreed.

All members are told of a probe. Each says in the reduction of the gradient norm which one it knows,
as for proposals; once all have said the same, those who are asked do it before the next step. So
both ends of a link are there, and nobody waits for somebody who does not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from megatron.resilience.executor.guard import Figures
from megatron.resilience.recovery.ballot import unanimous, vote
from megatron.resilience.validation.bench import Bench
from resihp_ext.control import messages as say
from resihp_ext.control.messages import Message
from resihp_ext.detector.probe import Measured, Task, TaskKind

PHASE = "probe"


class Told(Protocol):
    """What this worker has been told."""

    rank: int
    epoch: int

    @property
    def probe(self) -> say.Probe | None: ...
    def offer(self, message: Message) -> None: ...


class Guard(Protocol):
    """Lets this rank survive others meanwhile."""

    def look(self, phase: str, micro_batch: int = 0, *, waiting: bool = False) -> None: ...
    def aside(self, phase: str, attempt: Callable[[], Figures]) -> bool: ...


class Validator:
    """One rank's part in probes."""

    def __init__(
        self,
        told: Told,
        guard: Guard,
        bench: Callable[[], Bench],
        apart: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """Prepares it.

        Args:
            bench: Gives what measures on this rank, in the world that it is in now.
            apart: Around what belongs to no step.
        """
        self._told, self._guard, self._bench, self._apart = told, guard, bench, apart
        self._voted: say.Probe | None = None
        self._due: say.Probe | None = None
        self._done = 0

    def ballot(self) -> Figures:
        """Which probe this rank knows, and has not done."""
        probe = self._told.probe
        valid = probe is not None and probe.epoch == self._told.epoch and probe.number > self._done
        self._voted = probe if valid else None
        return vote(0 if self._voted is None else self._voted.number)

    def counted(self, sums: Figures, everyone: int) -> None:
        """Takes the sums over all members: what all know is done before the next step."""
        if self._voted is not None and unanimous(sums, everyone):
            self._due = self._voted

    def between_steps(self, step: int) -> None:
        """Does what is due; a loss in between makes it void.

        Args:
            step: The one that is about to begin, from 1.
        """
        probe, self._due = self._due, None
        if probe is None or probe.epoch != self._told.epoch:
            return
        self._done = probe.number
        rank, measured = self._told.rank, []
        mine = [(at, task) for at, task in enumerate(probe.tasks) if rank in task.ranks]
        if not mine:
            return
        begun_s = time.perf_counter()

        def attempt() -> Figures:
            bench = self._bench()
            for at, task in mine:
                self._guard.look(PHASE, waiting=task.kind is not TaskKind.GEMM)
                measured.append(Measured(at, tuple(_seconds(bench, task, rank))))
            return ()

        # Who was lost meanwhile has ended this probe for all: the coordinator hears of the loss.
        with self._apart():
            done = self._guard.aside(PHASE, attempt)
        if done:
            took_s = time.perf_counter() - begun_s
            self._told.offer(
                say.Probed(
                    rank=rank,
                    number=probe.number,
                    step=step,
                    took_s=took_s,
                    measured=tuple(one for one in measured if one.seconds),
                )
            )


def _seconds(bench: Bench, task: Task, rank: int) -> Sequence[float]:
    match task.kind:
        case TaskKind.GEMM:
            return bench.gemm_s()
        case TaskKind.P2P:
            first, second = task.ranks
            return bench.p2p_s(second if rank == first else first, first=rank == first)
        case TaskKind.ALL_REDUCE:
            return bench.all_reduce_s(task.ranks, rank)
