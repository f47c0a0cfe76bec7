"""Seconds of the pipeline part of a step, without building the program.

Promise: exactly what ``dry_run`` says of ``one_forward_one_backward`` up to SYNC, to the last bit.
Planners ask this question thousands of times, so here the order of the schedule and the times of
its execution come from one pass over flat arrays: whatever a task waits for has been given its
times before the schedule's clock can start it. A test compares both on random plans.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

Pair = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of one micro-batch on one instance."""

    order: Pair
    """Forward and backward as the schedule assumes them."""
    run: Pair
    """As they are."""


@dataclass(frozen=True, slots=True)
class Hop:
    """Seconds of a boundary tensor on its way to the next instance, or back from it."""

    wire: Pair
    """Forward, and backward, until it has arrived."""
    gather: Pair
    """After arrival, on the receiver: forward on the next instance, backward on this one."""


NO_HOP = Hop((0.0, 0.0), (0.0, 0.0))


def _columns(hops: Sequence[Hop]) -> tuple[list[float], ...]:
    """For each stage: sending forward, gathering forward, sending backward, gathering backward."""
    after, before = [*hops, NO_HOP], [NO_HOP, *hops]
    return (
        [hop.wire[0] for hop in after],
        [hop.gather[0] for hop in before],
        [hop.wire[1] for hop in before],
        [hop.gather[1] for hop in after],
    )


def chain_s(stages: Sequence[StageTimes], hops: Sequence[Hop], micro_batches: int) -> float:
    """Time of one replica whose micro-batches stay in it; ``hops[s]`` follows stage ``s``."""
    count, last = len(stages), len(stages) - 1
    order_f, order_b = zip(*(one.order for one in stages), strict=True)
    run_f, run_b = zip(*(one.run for one in stages), strict=True)
    wire_f, gather_f, wire_b, gather_b = _columns(hops)
    came_f: list[list[float]] = [[] for _ in range(count + 1)]
    came_b: list[list[float]] = [[] for _ in range(count + 1)]
    came_f[0] = [0.0] * micro_batches
    came_b[last] = [0.0] * micro_batches
    ready_f, ready_b = [0] * count, [0] * count
    ready_f[0] = micro_batches
    begun_f, begun_b, done_b = [0] * count, [0] * count, [0] * count
    free, busy = [0.0] * count, [False] * count
    events: list[tuple[float, int]] = []
    now, awake = 0.0, [0]
    while True:
        for s in awake:
            if busy[s]:
                continue
            number = begun_f[s]
            if ready_f[s] > number and number - done_b[s] < count - s:
                begun_f[s] = number + 1
                came = came_f[s][number]
                end = (free[s] if free[s] > came else came) + gather_f[s] + run_f[s]
                came_f[s + 1].append(end + wire_f[s])
                heappush(events, (now + order_f[s], s))
            elif ready_b[s] > begun_b[s]:
                number = begun_b[s]
                begun_b[s] = number + 1
                came = came_b[s][number]
                end = (free[s] if free[s] > came else came) + gather_b[s] + run_b[s]
                if s:
                    came_b[s - 1].append(end + wire_b[s])
                heappush(events, (now + order_b[s], s + count))
            else:
                continue
            free[s] = end
            busy[s] = True
        if not events:
            return max(free)
        now = events[0][0]
        awake = []
        while events and events[0][0] == now:
            s = heappop(events)[1]
            if s < count:
                if s == last:
                    ready_b[s] += 1
                else:
                    ready_f[s + 1] += 1
                    awake.append(s + 1)
            else:
                s -= count
                done_b[s] += 1
                if s:
                    ready_b[s - 1] += 1
                    awake.append(s - 1)
            busy[s] = False
            awake.append(s)


def web_s(
    stages: Sequence[StageTimes],
    routes: Sequence[tuple[int, ...]],
    hops: dict[tuple[int, int], Hop],
) -> float:
    """Time of instances that micro-batches reach on any routes.

    Args:
        stages: The instances.
        routes: For each micro-batch, in order, the instances it visits.
        hops: For each pair of instances that follow each other on a route.
    """
    return Web(stages, routes, hops).run()


class Web:
    """Plays a step over any routes. Without hops transfers take no time.

    Tasks are numbered ``micro_batch * longest + place``: heaps of them put the oldest first."""

    def __init__(
        self,
        stages: Sequence[StageTimes],
        routes: Sequence[Sequence[int]],
        hops: dict[tuple[int, int], Hop] | None,
    ) -> None:
        self._stages, self._routes, self._hops = stages, routes, hops
        self._longest = max(map(len, routes), default=0) + 1
        self._limit = [0] * len(stages)
        for route in routes:
            for place, one in enumerate(route):
                self._limit[one] = max(self._limit[one], len(route) - place)
        self._ready_f: list[list[int]] = [[] for _ in stages]
        self._ready_b: list[list[int]] = [[] for _ in stages]
        self._in_flight = [0] * len(stages)
        self._busy = [False] * len(stages)
        self._free = [0.0] * len(stages)
        self._came: dict[int, float] = {}
        self._events: list[tuple[float, int]] = []

    def run(self) -> float:
        """Plays the step."""
        for number, route in enumerate(self._routes):
            heappush(self._ready_f[route[0]], number * self._longest)
        awake = set(range(len(self._stages)))
        now, events = 0.0, self._events
        while True:
            for one in awake:
                self._start(one, now)
            if not events:
                return max(self._free, default=0.0)
            now, awake = events[0][0], set()
            while events and events[0][0] == now:
                self._finish(heappop(events)[1], awake)

    def _start(self, one: int, now: float) -> None:
        if self._busy[one]:
            return
        if self._ready_f[one] and self._in_flight[one] < self._limit[one]:
            task = heappop(self._ready_f[one])
            self._in_flight[one] += 1
            way, step = 0, 1
            self.begun(one, task // self._longest)
        elif self._ready_b[one]:
            task = heappop(self._ready_b[one])
            way, step = 1, -1
        else:
            return
        number, place = divmod(task, self._longest)
        route = self._routes[number]
        time = self._free[one]
        come, go = place - step, place + step
        if 0 <= come < len(route):
            time = max(time, self._came.pop(2 * task + way))
            time += self._hop(route, come, place).gather[way]
        time += self._stages[one].run[way]
        if 0 <= go < len(route):
            self._came[2 * (task + step) + way] = time + self._hop(route, place, go).wire[way]
        self._free[one] = time
        self._busy[one] = True
        heappush(self._events, (now + self._stages[one].order[way], 2 * task + way))

    def _hop(self, route: Sequence[int], a: int, b: int) -> Hop:
        return NO_HOP if self._hops is None else self._hops[route[min(a, b)], route[max(a, b)]]

    def _finish(self, event: int, awake: set[int]) -> None:
        task, way = divmod(event, 2)
        number, place = divmod(task, self._longest)
        route = self._routes[number]
        one = route[place]
        self._busy[one] = False
        awake.add(one)
        if way:
            self._in_flight[one] -= 1
            if place:
                self.wake(self._ready_b, route[place - 1], task - 1, awake)
            self.done(one, awake)
        elif place + 1 < len(route):
            self.wake(self._ready_f, route[place + 1], task + 1, awake)
        else:
            self.wake(self._ready_b, one, task, awake)

    def begun(self, one: int, number: int) -> None:
        """Told of every forward that begins."""

    def done(self, one: int, awake: set[int]) -> None:
        """Told of every backward that ends."""

    @staticmethod
    def wake(ready: list[list[int]], one: int, task: int, awake: set[int]) -> None:
        """Gives an instance a task that can run."""
        heappush(ready[one], task)
        awake.add(one)
