"""Figures that a coordinator keeps about its job: durations by size, and the pace of steps.

Both need the same memory however long a job runs. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

BOUNDS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Recoveries take a second or two; those that load a checkpoint, minutes."""
STEPS_KEPT = 16


@dataclass(slots=True)
class Tally:
    """How many durations there were up to each bound, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    """By the first bound of :data:`BOUNDS_S` that is not exceeded; the last is of none."""
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        """One more."""
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += seconds


class Pace:
    """What a step takes: the mean of the last ones, with all that came between them."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=STEPS_KEPT)

    def seen(self, step: int, now_s: float) -> None:
        """Somebody is at a step; one that was seen before, or lies behind, is no news."""
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((now_s, step))

    @property
    def step_s(self) -> float | None:
        """Seconds; None before a step was seen to follow another one."""
        if not self._seen:
            return None
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last_s - first_s) / (last - first) if last > first else None
