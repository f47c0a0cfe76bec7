"""ReCycle's schedule: micro-batches on any routes, weight gradients put off into bubbles.

Source: BASELINES 1.2, 1.3 and 1.5 (decoupled backward, staggered optimizer, and the list scheduler
that was checked there). A worker prefers B, then F, then W, and the oldest micro-batch of each; it
holds at most so many activations from F to W. The source solves an integer program for re-routed
work only; a list scheduler is never better than that, so steps may be a little too long.

With F = B = W = 1, no communication, room for twice the stages (BASELINES' figures in brackets):

| stages, pipelines, micro-batches of each | failed workers | decoupled | staggered | bound |
|---|---|---|---|---|
| 8, 4, 16 | one | 69 (70) | 66 (66) | 64 |
| 8, 4, 16 | two of one stage | 99 | 96 (96) | 96 |
| 8, 4, 16 | two of two stages | 71 | 66 (71) | 64 |
| 8, 8, 32 | one | 114 (119) | 111 (111) | 109.7 |
| 4, 4, 16 | one | 67 (68) | 66 (66) | 64 |

With room for as many as there are stages, the first row is 72 (70) and 72 (69): here the list
scheduler of BASELINES was better, and the policy takes more room where memory allows it.

Promise: the order comes from a run on a clock, so it cannot deadlock: backwards and the last stage
need no room, and what they free lets the stage before go on.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from resihp_ext.plan.action import END, Kind
from resihp_ext.plan.clock import Task
from resihp_ext.plan.fifo import received_in_order
from resihp_ext.plan.plan import Instance, Plan, Route
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import Duration, with_transfers

ORDER = (Kind.BACKWARD, Kind.FORWARD, Kind.WEIGHT)
"""What a worker prefers."""


@dataclass(frozen=True, slots=True)
class Decoupled:
    """Builds such programs."""

    rooms: tuple[tuple[tuple[int, int], int], ...] = ()
    """Activations that a worker holds at most, by the layers of its stage."""
    room_ratio: float = 2.0
    """The same for all others, over the stages of the longest route."""

    def __call__(self, plan: Plan, duration: Duration) -> Program:
        """The program of a plan, or of a part of one."""
        longest = max(map(len, plan.routes), default=1)
        known, usual = dict(self.rooms), max(1, int(self.room_ratio * longest))
        rooms = {host: known.get(plan.stage(host).layers, usual) for host in plan.hosts}
        order = play(plan, duration, rooms)
        lists = [(h, (*with_transfers(plan, order.get(h, [])), *END)) for h in plan.hosts]
        return received_in_order(Program(lists=tuple(lists)))


@dataclass(slots=True)
class _Worker:
    room: int
    ready: dict[Kind, list[tuple[int, Instance]]] = field(
        default_factory=lambda: {kind: [] for kind in ORDER}
    )
    held: int = 0
    busy: bool = False
    order: list[Task] = field(default_factory=list)

    def take(self) -> Task | None:
        """Starts what comes first."""
        for kind in ORDER:
            heap = self.ready[kind]
            if not heap or (kind is Kind.FORWARD and self.held >= self.room):
                continue
            number, instance = heapq.heappop(heap)
            self.held += kind is Kind.FORWARD
            self.busy = True
            self.order.append((kind, number, instance))
            return kind, number, instance
        return None


def play(
    plan: Plan, duration: Duration, rooms: Mapping[Instance, int]
) -> dict[Instance, list[Task]]:
    """What each host computes, in order."""
    workers = {host: _Worker(rooms[host]) for host in plan.hosts}
    for number, route in enumerate(plan.routes):
        heapq.heappush(workers[route[0]].ready[Kind.FORWARD], (number, route[0]))
    place = {(m, one): at for m, route in enumerate(plan.routes) for at, one in enumerate(route)}
    events: list[tuple[float, int, int, Instance]] = []
    now, touched = 0.0, set(workers)
    while True:
        for host in sorted(touched):
            worker = workers[host]
            task = None if worker.busy else worker.take()
            if task is not None:
                kind, number, instance = task
                ends = now + duration(instance, kind)
                heapq.heappush(events, (ends, number, ORDER.index(kind), instance))
        if not events:
            return {host: worker.order for host, worker in workers.items()}
        now, touched = events[0][0], set()
        while events and events[0][0] == now:
            _, number, kind_at, instance = heapq.heappop(events)
            worker, kind = workers[instance], ORDER[kind_at]
            worker.busy = False
            worker.held -= kind is Kind.WEIGHT
            touched.add(instance)
            at = place[number, instance]
            for then, target in _follows(kind, plan.routes[number], at):
                heapq.heappush(workers[target].ready[then], (number, target))
                touched.add(target)


def _follows(kind: Kind, route: Route, at: int) -> list[tuple[Kind, Instance]]:
    """What becomes ready by the end of something."""
    here = route[at]
    if kind is Kind.FORWARD:
        return [(Kind.FORWARD, route[at + 1]) if at + 1 < len(route) else (Kind.BACKWARD, here)]
    if kind is Kind.BACKWARD:
        return [(Kind.WEIGHT, here), *([(Kind.BACKWARD, route[at - 1])] if at else [])]
    return []
