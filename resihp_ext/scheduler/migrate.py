"""Progress-aware migration of micro-batches between replicas (the paper's Algorithm 1).

Played on the clock of 1F1B. Progress is the number of micro-batches that a replica is done with at
a stage: in the forwards alone a replica may lag for the length of its warm-up, which costs nothing.
Whenever the front runner of a stage advances, it is compared with the slowest. If the gap exceeds
``delta``, the last micro-batch that the slowest has not begun there goes, for this stage alone, to
the instance that would be done first, if that one is faster and would be done before the slowest
would without the move: progress alone would take more from a slow replica than others can carry.

Memory needs no check of its own: 1F1B keeps as many micro-batches in flight as stages remain,
whichever replica they come from, and a replica that takes part has room for these.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify

from resihp_ext.scheduler.clock import StageTimes, Web

Homes = list[int]
"""The replica of each micro-batch."""


def migrated(
    stages: Sequence[Sequence[StageTimes]], homes: Homes, delta: int
) -> list[tuple[int, ...]]:
    """Plays a step and moves what lags.

    Args:
        stages: For each replica the times of its stages; all have equally many, with equal layers.
        homes: Where each micro-batch would run.
        delta: See above.

    Returns:
        For each micro-batch the replica at each stage.
    """
    alike = all(len({one.run for one in place}) == 1 for place in zip(*stages, strict=True))
    if alike or not homes:
        return [(home,) * len(stages[home]) for home in homes]
    play = _Migration(stages, homes, delta)
    play.run()
    return play.found()


class _Migration(Web):
    """Instance ``replica * stages + stage``; routes may change where they have not been begun."""

    def __init__(self, stages: Sequence[Sequence[StageTimes]], homes: Homes, delta: int) -> None:
        self._width, self._replicas, self._delta = len(stages[0]), len(stages), delta
        places = range(self._width)
        self._ways = [[home * self._width + place for place in places] for home in homes]
        # Only the order of tasks is wanted: no transfers.
        super().__init__([one for replica in stages for one in replica], self._ways, None)
        self._limit = [self._width - place for _ in stages for place in places]
        self._pending: list[list[int]] = [[] for _ in self._stages]
        for number, way in enumerate(self._ways):
            for one in way:
                self._pending[one].append(number)
        self._done = [0] * len(self._stages)
        self._seconds = [sum(one.run) for one in self._stages]
        self._most = [0] * self._width

    def found(self) -> list[tuple[int, ...]]:
        """Where every micro-batch went."""
        return [tuple(one // self._width for one in way) for way in self._ways]

    def begun(self, one: int, number: int) -> None:
        """A forward: it can no longer move."""
        self._pending[one].remove(number)

    def done(self, one: int, awake: set[int]) -> None:
        """Looks at the gap at this stage, when its front runner has advanced."""
        self._done[one] += 1
        place = one % self._width
        if self._done[one] <= self._most[place]:
            return
        self._most[place] = self._done[one]
        others = range(place, len(self._stages), self._width)
        lagging = [o for o in others if self._pending[o]]
        if not lagging:
            return
        slowest = min(lagging, key=lambda o: (self._done[o], -self._left_s(o, 0), o))
        if self._most[place] - self._done[slowest] <= self._delta:
            return
        faster = [o for o in others if self._seconds[o] < self._seconds[slowest]]
        if not faster:
            return
        fastest = min(faster, key=lambda o: (self._left_s(o, 1), o))
        if self._left_s(fastest, 1) < self._left_s(slowest, 0):
            self._move(place, slowest, fastest, awake)

    def _left_s(self, one: int, more: int) -> float:
        return (len(self._pending[one]) + more) * self._seconds[one]

    def _move(self, place: int, source: int, target: int, awake: set[int]) -> None:
        number = self._pending[source].pop()
        self._pending[target].append(number)
        self._pending[target].sort()
        self._ways[number][place] = target
        task = number * self._longest + place
        if task in self._ready_f[source]:
            self._ready_f[source].remove(task)
            heapify(self._ready_f[source])
            self.wake(self._ready_f, target, task, awake)
