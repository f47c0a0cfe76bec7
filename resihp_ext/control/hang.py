"""Which worker makes no progress: rules without clocks, processes or sockets of their own.

A worker says every moment in which phase it is, how many actions it has finished (``ticks``) and
whether it waits for others. From that:

* silent: no word for :attr:`HangRules.silence_s`: it is stopped, or something keeps the
  interpreter to itself;
* hung: it does not wait, and its ticks stand still for longer than the limit of its phase;
* stuck: everybody waits and nobody moves: nobody is to blame, and only the coordinator, who sees
  all nodes, can tell.

The limit of a phase is the larger of its floor and a multiple of the longest time that a tick took
in that phase when all was well. The first step of a process, and the first after a recovery or
change of layout, gets :attr:`HangRules.first_s`: kernels are compiled, connections made. A worker
that waits is a victim, unless it was told to stop waiting (:meth:`Watch.told`). After a verdict the
clocks of the worker begin anew: a second incident, or a process that a signal did not end, is found
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from resihp_ext.control.messages import Progress

SETUP = "setup"
PATIENT_S = MappingProxyType(
    {
        SETUP: 1800.0,
        "checkpoint": 3600.0,
        "evaluation": 1800.0,
        "recovery": 300.0,
        "change": 300.0,
    }
)
"""Floors of phases in which one action may take long."""
RENEWING = frozenset({SETUP, "recovery", "change"})
"""After these the next step is a first one again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HangRules:
    """Limits, in seconds."""

    silence_s: float = 5.0
    patient_silence_s: float = 60.0
    """In patient phases and first steps, where one call into a library may keep the interpreter
    for long. A process that the system shows as stopped gets no such patience."""
    floor_s: float = 30.0
    """Of every phase that is not in :attr:`floors_s`."""
    floors_s: Mapping[str, float] = PATIENT_S
    first_s: float = 600.0
    """Floor of every phase in a first step."""
    factor: float = 5.0
    """Times the longest healthy duration of a tick in a phase."""
    stuck_floor_s: float = 60.0
    """Before all who wait may be called stuck."""
    gap_s: float = 2.0
    """When nobody has looked for so long, this process itself was held up: nothing that happened
    in between counts against a worker."""

    def floor_of(self, phase: str, *, fresh: bool) -> float:
        """How long a tick may take at least, before anything was learnt."""
        floor_s = self.floors_s.get(phase, self.floor_s)
        return max(floor_s, self.first_s) if fresh else floor_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """A worker that is to be ended."""

    rank: int
    cause: str


@dataclass(slots=True)
class _Worker:
    heard_s: float
    moved_s: float
    phase: str
    ticks: int = -1
    step: int = 0
    waiting: bool = False
    speaks: bool = False
    """Whether it has ever said anything; before that its silence means nothing."""
    excused: bool = True
    """Whether waiting counts as an excuse, and a long tick as healthy."""
    fresh: bool = True
    """Whether it has not finished a step yet since it was set up or changed."""
    first_step: int | None = None
    """The step that it has to finish for that."""

    def renew(self, message: Progress) -> None:
        """Finds out whether a first step begins or is over."""
        if message.phase in RENEWING:
            self.fresh, self.first_step = True, None
        elif self.first_step is None:
            self.first_step = message.step
        elif message.step > self.first_step:
            self.fresh = False


@dataclass(slots=True)
class Watch:
    """The workers of one node."""

    rules: HangRules = field(default_factory=HangRules)
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _longest_s: dict[tuple[str, bool], float] = field(default_factory=dict)
    """By phase, and whether it was spent waiting."""
    _looked_s: float | None = None

    def begin(self, rank: int, now_s: float, *, speaks: bool = False) -> None:
        """A new process has the rank; ``speaks`` once it has connected."""
        self._workers[rank] = _Worker(now_s, now_s, SETUP, speaks=speaks)

    def forget(self, rank: int) -> None:
        """The process has ended, or is about to."""
        self._workers.pop(rank, None)

    def heard(self, message: Progress, now_s: float) -> None:
        """A worker of this node has spoken."""
        worker = self._workers.get(message.rank)
        if worker is None:
            return
        if message.ticks != worker.ticks:
            if worker.excused and worker.ticks >= 0 and not worker.fresh:
                key = (worker.phase, worker.waiting)
                took_s = now_s - worker.moved_s
                self._longest_s[key] = max(self._longest_s.get(key, 0.0), took_s)
            worker.ticks, worker.moved_s, worker.excused = message.ticks, now_s, True
        worker.heard_s, worker.speaks = now_s, True
        worker.phase, worker.waiting, worker.step = message.phase, message.waiting, message.step
        worker.renew(message)

    def told(self, rank: int, now_s: float) -> None:
        """A worker was told to stop what it does: from now on it has to move, waiting or not."""
        worker = self._workers.get(rank)
        if worker is not None:
            worker.moved_s, worker.excused = now_s, False

    def look(
        self, now_s: float, stopped: Callable[[int], bool] = lambda _rank: False
    ) -> list[Verdict]:
        """Who is silent or hung; ``stopped`` says whether the system shows a process as stopped."""
        self._forgive(now_s)
        found = []
        for rank, worker in self._workers.items():
            cause = self._silent(rank, worker, now_s, stopped) or self._hung(worker, now_s)
            if cause:
                found.append(Verdict(rank, cause))
                worker.heard_s = worker.moved_s = now_s
                worker.excused = False
        return found

    def _forgive(self, now_s: float) -> None:
        gap_s = 0.0 if self._looked_s is None else now_s - self._looked_s
        self._looked_s = now_s
        if gap_s > self.rules.gap_s:
            for worker in self._workers.values():
                worker.heard_s = min(now_s, worker.heard_s + gap_s)
                worker.moved_s = min(now_s, worker.moved_s + gap_s)

    def _silent(
        self, rank: int, worker: _Worker, now_s: float, stopped: Callable[[int], bool]
    ) -> str:
        silent_s = now_s - worker.heard_s
        if not worker.speaks or silent_s <= self.rules.silence_s:
            return ""
        is_stopped = stopped(rank)
        patient = worker.fresh or worker.phase in self.rules.floors_s
        if patient and not is_stopped and silent_s <= self.rules.patient_silence_s:
            return ""
        why = "the process is stopped" if is_stopped else f"phase {worker.phase}"
        return f"gave no sign of life for {silent_s:.1f} s ({why})"

    def _hung(self, worker: _Worker, now_s: float) -> str:
        still_s = now_s - worker.moved_s
        if worker.waiting and worker.excused:
            return ""
        if still_s <= self.limit_s(worker.phase, fresh=worker.fresh):
            return ""
        return f"made no progress for {still_s:.1f} s in step {worker.step}, phase {worker.phase}"

    def limit_s(self, phase: str, *, fresh: bool = False) -> float:
        """How long a tick may take in a phase."""
        floor_s = self.rules.floor_of(phase, fresh=fresh)
        return max(floor_s, self.rules.factor * self._longest_s.get((phase, False), 0.0))

    def _stuck_limit_s(self, worker: _Worker) -> float:
        limit_s = self.limit_s(worker.phase, fresh=worker.fresh)
        longest_s = self._longest_s.get((worker.phase, True), 0.0)
        return max(self.rules.stuck_floor_s, limit_s, self.rules.factor * longest_s)

    def stuck_s(self, now_s: float) -> float:
        """How long nobody has moved, if all wait for longer than usual; else 0."""
        workers = self._workers.values()
        if not workers or not all(worker.waiting for worker in workers):
            return 0.0
        if any(now_s - one.moved_s <= self._stuck_limit_s(one) for one in workers):
            return 0.0
        return min(now_s - one.moved_s for one in workers)

    @property
    def step(self) -> int:
        """The furthest that a worker has come."""
        return max((worker.step for worker in self._workers.values()), default=0)
