"""The zero-bubble schedule of one replica, with warm-ups that make up for slow links.

Source: BASELINES 4, from Adaptra's repository (PipeMorph). Backward is split; ``x`` forwards of a
stage come before its first backward, and what they exceed those of the next stage by is the slack
that the link between the two may use up. After the warm-up the stage prefers B, then F, then W. A
transfer keeps no stage busy (theirs run in processes of their own).

Promise: the order comes from a run on a clock, so it cannot deadlock; no more activations are held
than there is room for.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, inf

from resihp_ext.plan.action import Kind

Times = tuple[float, float, float]
"""Seconds of F, B and W of a stage."""
Order = list[tuple[Kind, int]]
"""What a stage computes: kind and micro-batch."""

PARTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the delays, for which warm-ups are tried (PipeMorph searches such a part, too)."""


def even_warm_ups(first: int, stages: int) -> tuple[int, ...]:
    """Warm-ups that fall evenly from the first stage to 1 on the last: the schedule without slow
    links.

    The first ``(first - 1) mod (stages - 1)`` differences are larger by one.
    """
    if stages == 1:
        return (1,)
    each, more = divmod(max(0, first - 1), stages - 1)
    found = [1]
    for place in reversed(range(stages - 1)):
        found.append(found[-1] + each + (place < more))
    return tuple(reversed(found))


def adapted_warm_ups(forward_s: Sequence[float], delays_s: Sequence[float]) -> tuple[int, ...]:
    """``x_i = x_{i+1} + ceil(c_i / F_i) + 2``, and 1 on the last stage.

    Args:
        forward_s: Of each stage.
        delays_s: One way, of the link after each stage but the last.
    """
    found = [1]
    for seconds, delay_s in reversed(list(zip(forward_s, delays_s, strict=False))):
        # Rounding must not make a delay of no time cost a forward.
        found.append(found[-1] + ceil(round(delay_s / seconds, 9)) + 2)
    return tuple(reversed(found))


@dataclass(frozen=True, kw_only=True, slots=True)
class Played:
    """How a step went on the clock."""

    orders: tuple[Order, ...]
    seconds: float


def zero_bubble(
    times: Sequence[Times], delays_s: Sequence[float], rooms: Sequence[int], micro_batches: int
) -> Played:
    """The best order among those of several warm-ups, with and without forwards in gaps.

    Args:
        times: Of each stage.
        delays_s: One way, of the link after each stage but the last.
        rooms: Activations that each stage may hold, from F to W; at least 1.
    """
    plays = [
        _Clock(times, delays_s, rooms, warm, micro_batches, fill).run()
        for warm in _warm_ups(times, delays_s, rooms, micro_batches)
        for fill in (False, True)
    ]
    return min(plays, key=lambda one: one.seconds)


def _warm_ups(
    times: Sequence[Times], delays_s: Sequence[float], rooms: Sequence[int], micro_batches: int
) -> Iterator[tuple[int, ...]]:
    """Without repetitions, none above room and micro-batches."""
    stages = len(times)
    found = [even_warm_ups(first, stages) for first in (stages, 2 * stages - 1, rooms[0])]
    forward_s = [one[0] for one in times]
    for part in PARTS:
        found.append(adapted_warm_ups(forward_s, [part * delay_s for delay_s in delays_s]))
    clipped = (
        tuple(min(x, room, micro_batches) for x, room in zip(one, rooms, strict=True))
        for one in found
    )
    yield from dict.fromkeys(clipped)


@dataclass(slots=True)
class _Stage:
    """One stage on the clock; counts are of micro-batches begun."""

    came_f: list[float]
    """When inputs arrive: of micro-batches in order, as far as it is known."""
    came_b: list[float]
    f: int = 0
    b: int = 0
    w: int = 0
    free_s: float = 0.0


class _Clock:
    """Plays one step."""

    def __init__(
        self,
        times: Sequence[Times],
        delays_s: Sequence[float],
        rooms: Sequence[int],
        warm: Sequence[int],
        micro_batches: int,
        fill: bool,
    ) -> None:
        self._times, self._delays_s, self._rooms = times, delays_s, rooms
        self._warm, self._count, self._fill = warm, micro_batches, fill
        self._stages = [_Stage([], []) for _ in times]
        self._stages[0].came_f = [0.0] * micro_batches
        self._orders: tuple[Order, ...] = tuple([] for _ in times)
        self._wakes: list[tuple[float, int]] = [(0.0, 0)]

    def run(self) -> Played:
        """Plays until nothing runs."""
        while self._wakes:
            now, at = heapq.heappop(self._wakes)
            if self._stages[at].free_s <= now:
                self._start(at, now)
        assert all(one.w == self._count for one in self._stages), "a zero-bubble step that stops"
        return Played(orders=self._orders, seconds=max(one.free_s for one in self._stages))

    def _start(self, at: int, now: float) -> None:
        stage = self._stages[at]
        kind = self._choice(at, stage, now)
        if kind is None:
            return
        forward_s, backward_s, weight_s = self._times[at]
        last = at == len(self._stages) - 1
        if kind is Kind.FORWARD:
            end, number, stage.f = now + forward_s, stage.f, stage.f + 1
            self._send(stage.came_b if last else self._stages[at + 1].came_f, at, at + 1, end)
        elif kind is Kind.BACKWARD:
            end, number, stage.b = now + backward_s, stage.b, stage.b + 1
            if at:
                self._send(self._stages[at - 1].came_b, at - 1, at - 1, end)
        else:
            end, number, stage.w = now + weight_s, stage.w, stage.w + 1
        stage.free_s = end
        self._orders[at].append((kind, number))
        heapq.heappush(self._wakes, (end, at))

    def _send(self, came: list[float], link: int, to: int, end: float) -> None:
        """Behind the last stage there is no link."""
        inside = to == len(self._stages)
        arrival = end if inside else end + self._delays_s[link]
        came.append(arrival)
        if not inside:
            heapq.heappush(self._wakes, (arrival, to))

    def _choice(self, at: int, stage: _Stage, now: float) -> Kind | None:
        forward = (
            stage.f < len(stage.came_f)
            and stage.came_f[stage.f] <= now
            and stage.f - stage.w < self._rooms[at]
        )
        due_s = stage.came_b[stage.b] if stage.b < len(stage.came_b) else inf
        if forward and stage.f < self._warm[at]:
            return Kind.FORWARD
        if due_s <= now:
            return Kind.BACKWARD
        if forward and (self._fill or stage.f - stage.b < self._warm[at]):
            return Kind.FORWARD
        return Kind.WEIGHT if stage.w < stage.b else None
