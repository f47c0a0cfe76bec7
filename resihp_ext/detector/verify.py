"""Is a change point a change? Verification in the style of Greyhound, on any series.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from resihp_ext.detector.bocd import Bocd, BocdConfig, Window


def differ(left: Sequence[float], right: Sequence[float], ratio: float) -> bool:
    """Whether the means differ by more than ``ratio`` of the larger one."""
    if not left or not right:
        return False
    one, other = float(np.mean(left)), float(np.mean(right))
    return abs(one - other) > ratio * max(abs(one), abs(other))


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A verified change."""

    age: int
    """Observations since."""
    before: float
    after: float
    """Means on both sides."""


class Changes:
    """Change points of one series, kept only when verified."""

    def __init__(self, config: BocdConfig, *, ratio: float, distance: int, wait: int = 3) -> None:
        """Begins.

        Args:
            ratio: See :func:`differ`.
            distance: Observations that must lie between two change points.
            wait: Observations on the right side before the means are compared.
        """
        self._bocd, self._ratio, self._distance, self._wait = Bocd(config), ratio, distance, wait
        self._window = Window(config.longest_run_steps)
        self._since_last = 0
        self._pending: int | None = None

    @property
    def unsettled(self) -> bool:
        """Whether the first observations are still being taken."""
        return not self._bocd.settled

    def observe(self, value: float) -> Change | None:
        """Takes the next observation; returns a change as soon as it is verified."""
        if not np.isfinite(value):
            return None
        self._window.add(value)
        self._since_last += 1
        if self._pending is not None:
            self._pending += 1
        found = self._bocd.observe(value)
        if found is not None and self._pending is None:
            self._pending = found
        if self._pending is None or self._pending < self._wait:
            return None
        age = self._pending
        if self._since_last - age < self._distance:
            self._pending = None
            return None
        left, right = self._window.sides(age)
        left = left[-(self._since_last - age) :]
        if not differ(left, right, self._ratio):
            # What begins slowly, or was dated too early, is compared again when there is more.
            self._pending = age if age < self._distance else None
            return None
        self._pending, self._since_last = None, age
        return Change(age=age, before=float(np.mean(left)), after=float(np.mean(right)))
