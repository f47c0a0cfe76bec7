"""Plays one step of a plan on a clock to find in which order each rank group computes.

Every rank group is a worker that picks the next thing when it is free. What it may pick is the
rule of 1F1B, stated so that it fits any routes and any number of chunks:

- A worker has room for so many activations at once: on a host that micro-batches visit once, as
  many as stages remain on their longest route from there; on one that they visit several times, the
  stages that remain from the first visit and from the last, less one. On uniform plans these are
  the warm-ups of 1F1B and of its interleaved form (Narayanan et al. 2021), and one.
- While there is room, forwards go first, then backwards, then weight gradients.
- Turns: micro-batches are dealt with in groups of as many as their route has hosts, each group
  chunk after chunk, backwards from the last chunk to the first. Of a single chunk: oldest first.

An eager worker takes the first in turn of what is ready. So that activations of early chunks do not
fill the room that later ones need, chunks ``0..c`` of ``v`` may hold at most ``room - (v - 1 - c)``
at once. That excludes deadlock: suppose that nothing runs and micro-batches are left. All wait for
room to run forward; take the one that has come furthest through the layers, waiting with chunk
``c``. Chunks ``0..d`` are full for some ``d >= c``, which chunks ``0..c-1`` cannot achieve alone.
So some micro-batch has run chunk ``c`` or a later one there, hence has come further: a
contradiction.

A patient worker runs strictly in turn and waits for a forward while it has room: the textbook's
order, the best there is on uniform plans, poor on others, where it may also wait for ever.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from resihp_ext.plan.action import Kind
from resihp_ext.plan.plan import Instance, Plan, neighbours

Duration = Callable[[Instance, Kind], float]
"""Seconds (or any unit) that an instance takes for F, B or W of one micro-batch."""

Task = tuple[Kind, int, Instance]
"""What is computed: kind, micro-batch, and the instance, which says the chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """How a step went on the clock."""

    order: dict[Instance, list[Task]]
    """What each host computes, in order."""
    makespan: float


def room_of(plan: Plan) -> dict[Instance, int]:
    """How many activations each host that micro-batches visit may hold at once."""
    rooms: dict[Instance, int] = {}
    for route in plan.routes:
        left: dict[Instance, list[int]] = {}
        for place, instance in enumerate(route):
            left.setdefault(plan.host_of(instance), []).append(len(route) - place)
        for host, stages in left.items():
            need = stages[0] + (stages[-1] - 1 if len(stages) > 1 else 0)
            rooms[host] = max(rooms.get(host, len(plan.chunks(host))), need)
    return rooms


def play(
    plan: Plan,
    duration: Duration,
    *,
    split_backward: bool = False,
    forward_only: bool = False,
    patient: bool = False,
) -> Played | None:
    """Plays one step; None if patient workers wait for ever."""
    clock = _Clock(plan, duration, _Rules(split_backward, forward_only, patient))
    makespan = clock.run()
    order = {host: worker.order for host, worker in clock.workers.items()}
    passes = 1 if forward_only else 3 if split_backward else 2
    if sum(map(len, order.values())) < passes * sum(map(len, plan.routes)):
        assert patient, "eager workers do not deadlock"
        return None
    return Played(order=order, makespan=makespan)


class _Rules(NamedTuple):
    split_backward: bool
    forward_only: bool
    patient: bool


class _Turn(NamedTuple):
    """Something to compute; sorts as workers deal with it."""

    group: int
    chunk: int
    """Counted backwards from 0 where the last chunk comes first."""
    micro_batch: int
    instance: Instance


@dataclass
class _Worker:
    """One rank group on the clock."""

    room: int
    chunks: int
    patient: bool
    ready: dict[Kind, list[list[_Turn]]] = field(init=False)
    """Heaps of what can run, for each chunk; kinds in the order of precedence."""
    due: dict[Kind, list[_Turn]] = field(init=False)
    """Of a patient worker: all that is left to run, the next last."""
    held: list[int] = field(init=False)
    """Activations of each chunk."""
    busy: bool = False
    order: list[Task] = field(default_factory=list)

    def __post_init__(self) -> None:
        kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
        self.ready = {kind: [[] for _ in range(self.chunks)] for kind in kinds}
        self.due = {kind: [] for kind in kinds}
        self.held = [0] * self.chunks

    def take(self) -> tuple[Kind, _Turn] | None:
        """Starts the next thing, by the rule; None: nothing can be started."""
        for kind in self._kinds():
            heaps = (
                heap
                for chunk, heap in enumerate(self.ready[kind])
                if heap and (kind is not Kind.FORWARD or self._has_room(chunk))
            )
            heap = min(heaps, key=lambda heap: heap[0], default=None)
            due = self.due[kind]
            if heap is None or (due and due[-1] != heap[0]):
                continue
            if due:
                due.pop()
            turn = heapq.heappop(heap)
            self.held[turn.chunk] += kind is Kind.FORWARD
            self.busy = True
            self.order.append((kind, turn.micro_batch, turn.instance))
            return kind, turn
        return None

    def _kinds(self) -> tuple[Kind, ...]:
        if not self.patient:
            return Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT
        forward_next = self.due[Kind.FORWARD] and sum(self.held) < self.room
        return (Kind.FORWARD if forward_next else Kind.BACKWARD), Kind.WEIGHT

    def _has_room(self, chunk: int) -> bool:
        """Whether one more activation of a chunk may be held."""
        spare = 0 if self.patient else 1
        return all(
            sum(self.held[: deepest + 1]) < self.room - spare * (self.chunks - 1 - deepest)
            for deepest in range(chunk, self.chunks)
        )


class _Clock:
    """Plays one step: who finishes when, and what becomes ready by it."""

    def __init__(self, plan: Plan, duration: Duration, rules: _Rules) -> None:
        self._plan = plan
        self._duration = duration
        self._rules = rules
        self._events: list[tuple[float, Kind, _Turn]] = []
        self._chunk_of = {i: plan.chunks(i).index(i) for i in plan.instances}
        self._group_of = _groups(plan)
        self.workers = {
            host: _Worker(room, len(plan.chunks(host)), rules.patient)
            for host, room in self._rooms().items()
        }
        if rules.patient:
            self._set_turns()

    def run(self) -> float:
        """Plays until nothing runs; returns when that is."""
        now = 0.0
        for micro_batch, route in enumerate(self._plan.routes):
            self._make_ready(Kind.FORWARD, micro_batch, route[0])
        touched = set(self.workers)
        while True:
            for host in touched:
                self._start(host, now)
            if not self._events:
                return now
            touched = set()
            now = self._events[0][0]
            # All that ends now, before anything starts: precedence must not depend on heap order.
            while self._events and self._events[0][0] == now:
                _, kind, turn = heapq.heappop(self._events)
                touched |= self._finish(kind, turn)

    def _start(self, host: Instance, now: float) -> None:
        worker = self.workers[host]
        task = None if worker.busy else worker.take()
        if task:
            kind, turn = task
            heapq.heappush(self._events, (now + self._duration(turn.instance, kind), kind, turn))

    def _finish(self, kind: Kind, turn: _Turn) -> set[Instance]:
        """Frees the worker and makes ready what follows; returns the hosts that may go on."""
        micro_batch, instance = turn.micro_batch, turn.instance
        host = self._plan.host_of(instance)
        worker = self.workers[host]
        worker.busy = False
        if kind is (Kind.WEIGHT if self._rules.split_backward else Kind.BACKWARD):
            worker.held[self._chunk_of[instance]] -= 1
        followers = list(self._followers(kind, micro_batch, instance))
        for then, target in followers:
            self._make_ready(then, micro_batch, target)
        return {host, *(self._plan.host_of(target) for _, target in followers)}

    def _followers(
        self, kind: Kind, micro_batch: int, instance: Instance
    ) -> Iterator[tuple[Kind, Instance]]:
        before, after = neighbours(self._plan.routes[micro_batch], instance)
        if kind is Kind.FORWARD:
            if after:
                yield Kind.FORWARD, after
            elif not self._rules.forward_only:
                yield Kind.BACKWARD, instance
        elif kind is Kind.BACKWARD:
            if before:
                yield Kind.BACKWARD, before
            if self._rules.split_backward:
                yield Kind.WEIGHT, instance

    def _make_ready(self, kind: Kind, micro_batch: int, instance: Instance) -> None:
        turn = self._turn(kind, micro_batch, instance)
        worker = self.workers[self._plan.host_of(instance)]
        heapq.heappush(worker.ready[kind][self._chunk_of[instance]], turn)

    def _turn(self, kind: Kind, micro_batch: int, instance: Instance) -> _Turn:
        host, chunk = self._plan.host_of(instance), self._chunk_of[instance]
        return _Turn(
            group=self._group_of[host, micro_batch],
            chunk=chunk if kind is Kind.FORWARD else -chunk,
            micro_batch=micro_batch,
            instance=instance,
        )

    def _rooms(self) -> dict[Instance, int]:
        rooms = room_of(self._plan)
        if self._rules.forward_only:  # nothing is held until a backward
            visits = sum(map(len, self._plan.routes))
            return {host: room + visits for host, room in rooms.items()}
        return rooms

    def _set_turns(self) -> None:
        for micro_batch, route in enumerate(self._plan.routes):
            for instance in route:
                due = self.workers[self._plan.host_of(instance)].due
                due[Kind.FORWARD].append(self._turn(Kind.FORWARD, micro_batch, instance))
                if not self._rules.forward_only:
                    due[Kind.BACKWARD].append(self._turn(Kind.BACKWARD, micro_batch, instance))
        for worker in self.workers.values():
            for turns in worker.due.values():
                turns.sort(reverse=True)


def _groups(plan: Plan) -> dict[tuple[Instance, int], int]:
    """For each host and micro-batch that visits it: the number of the group of its turn."""
    visitors: dict[Instance, list[int]] = {}
    width: dict[Instance, int] = {}
    for micro_batch, route in enumerate(plan.routes):
        hosts = dict.fromkeys(map(plan.host_of, route))
        for host in hosts:
            visitors.setdefault(host, []).append(micro_batch)
            width[host] = max(width.get(host, 0), len(hosts))
    return {
        (host, micro_batch): number // width[host]
        for host, all_of_them in visitors.items()
        for number, micro_batch in enumerate(all_of_them)
    }
