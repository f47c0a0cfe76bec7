"""Many series of slowness at once, one for each device or link: which have left their level?

A series is observed over healthy time: 1.0 is healthy, 2.0 takes twice as long. A cumulative sum
(Page 1954) notices a change, and the last steps verify it: all of them above the threshold, in the
median well above the series' noise. One odd step does nothing.

Noise with heavy tails, as that of links, is not described by a spread. Where ``chance`` is given, a
series remembers its last steps: the more often single ones of them were as high as those that now
seem to be a change, the more in a row there must be.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resihp_ext.detector.config import DetectorConfig
from resihp_ext.detector.slots import Array, Ints, medians

SLACK = 0.04
"""What the cumulative sum forgives in each step, of the logarithm of the ratio."""
LEAST_NOISE = 0.004
REMEMBERED = 128
"""Steps, where tails are heavy."""
MOST_BIAS = 1.05
"""Devices differ by this factor for ever without being called slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rise:
    """A series that has become slower."""

    at: int
    level: float
    since_step: int


class Watch:
    """State of all series."""

    def __init__(
        self, size: int, over_ratio: float, config: DetectorConfig, *, chance: float | None = None
    ) -> None:
        self.over_ratio, self._config, self._chance = over_ratio, config, chance
        self._past = np.full((REMEMBERED if chance else 0, size), np.nan)
        """In the order of :attr:`_turn`; NaN where nothing was measured, or slowness is known."""
        self._turn = 0
        self.bias = np.ones(size)
        self.known = np.ones(size)
        """Levels that are known: no news."""
        self._noise = np.full(size, LEAST_NOISE)
        self._sum, self._since = np.zeros(size), np.zeros(size, dtype=np.int64)
        self._last = np.full((config.confirm_steps, size), np.nan)
        self._pardoned, self._until = np.ones(size), np.zeros(size, dtype=np.int64)

    def settle(self, ratios: Array) -> None:
        """Learns what is usual from the first steps, an array (steps, series)."""
        with np.errstate(all="ignore"):
            logs = np.log(ratios)
        middle = np.nan_to_num(medians(logs))
        spread = 1.4826 * medians(np.abs(logs - middle))
        self.bias = np.exp(np.clip(middle, -np.log(MOST_BIAS), np.log(MOST_BIAS)))
        self._noise = np.maximum(np.nan_to_num(spread), LEAST_NOISE)

    def remember(self, ratios: Array) -> None:
        """One more step of the past, where that is kept."""
        if len(self._past):
            self._past[self._turn % REMEMBERED] = np.where(self.known > 1, np.nan, ratios)
            self._turn += 1

    def levels(self) -> Array:
        """The median of the last steps; NaN where one is missing."""
        return np.asarray(np.median(self._last, axis=0))

    def last(self) -> Array:
        """The last step."""
        return np.asarray(self._last[-1])

    def steady(self) -> Array:
        """Which series are healthy beyond doubt: what may be learned from."""
        level = self._last[-1]
        return np.asarray((self._sum < 2 * SLACK) & (self.known == 1.0) & (level < 1 + 2 * SLACK))

    def observe(self, step: int, ratios: Array) -> tuple[list[Rise], list[int]]:
        """Takes a step; returns series that have become slower, and those that have recovered."""
        seen = np.isfinite(ratios) & (ratios > 0)
        level = np.where(seen, ratios, np.nan) / self.bias
        # What was not measured keeps its place in the row of confirming steps.
        everything = bool(seen.all())
        if everything:
            self._last[:-1] = self._last[1:]
            self._last[-1] = level
        else:
            self._last = np.where(seen, np.vstack((self._last[1:], level)), self._last)
        news = np.log((level if everything else np.where(seen, level, self.known)) / self.known)
        grown = np.minimum(np.maximum(news, -0.5), 0.5) + (self._sum - SLACK)
        grown = np.maximum(grown, 0.0)
        self._since[(self._sum == 0) & (grown > 0)] = step
        self._sum = grown if everything else np.where(seen, grown, self._sum)
        self.remember(level)
        return self._rises(step), self._recovered()

    def _rises(self, step: int) -> list[Rise]:
        config = self._config
        # Few or none are worth a closer look: no bar is below this one.
        least = 1 + 0.7 * (min(self.over_ratio, config.further_ratio) - 1)
        all_lowest = self._last.min(axis=0)
        at = np.flatnonzero((all_lowest > least) & (self._sum > 2 * SLACK))
        if not len(at):
            return []
        lowest = all_lowest[at]
        known = self.known[at]
        further = np.where(known > 1, known * config.further_ratio, self.over_ratio)
        pardon = np.where(self._until[at] > step, self._pardoned[at] * config.further_ratio, 0.0)
        limit = np.maximum(further, pardon)
        # Each of the steps is well on its way from the level that is no news to the limit.
        base = np.where(pardon > further, self._pardoned[at], known)
        bar = base + 0.7 * (limit - base)
        middle = np.median(self._last[:, at], axis=0)
        noise = config.noise_limit * self._noise[at] / np.sqrt(config.confirm_steps)
        found = (middle > limit) & (lowest > bar)
        found &= np.log(middle / known) > noise
        found &= (middle - known) > config.verify_ratio * middle
        if self._chance is not None:
            for i in np.flatnonzero(found):
                found[i] = known[i] > 1 or self._improbable(int(at[i]), float(bar[i]))
        return [
            Rise(at=int(i), level=float(m), since_step=int(self._since[i]))
            for i, m in zip(at[found], middle[found], strict=True)
        ]

    def _improbable(self, at: int, bar: float) -> bool:
        """Whether the last steps above the bar are too many for what steps before them were."""
        assert self._chance is not None
        high = self._latest(at)[::-1] > bar
        row = _first_false(high)
        before = high[row:]
        # Links of a job are alike: what all of them do now and then, this one may do as well.
        order = (self._turn - 1 - np.arange(row, REMEMBERED)) % REMEMBERED
        others = self._past[order]
        measured = max(int(np.isfinite(others).sum()), 1)
        often = int((others > bar).sum()) / measured
        single = max(float(before.sum() + 0.5) / (len(before) + 1), often)
        return bool(row * np.log(single) <= np.log(self._chance))

    def _latest(self, at: int) -> Array:
        """What was measured of a series, the oldest first."""
        past = np.roll(self._past[:, at], -self._turn % REMEMBERED)
        return np.asarray(past[np.isfinite(past)])

    def _forget(self, at: int) -> None:
        """The last steps in a row that were high were no healthy ones."""
        order = (self._turn - 1 - np.arange(REMEMBERED)) % REMEMBERED
        values = self._past[order, at]
        row = _first_false(~(values <= 1 + 2 * SLACK))
        self._past[order[:row], at] = np.nan

    def _recovered(self) -> list[int]:
        at = np.flatnonzero(self.known > 1)
        if not len(at):
            return []
        # What was not measured yet compares as false.
        with np.errstate(invalid="ignore"):
            back = at[np.max(self._last[:, at], axis=0) < self._config.recovered_ratio]
        if len(back):
            self.know(back, 1.0)
        return [int(i) for i in back]

    def know(self, at: Sequence[int] | Ints, level: float) -> None:
        """From now on this level of some series is no news."""
        at = np.asarray(at, dtype=np.int64)
        if level > 1 and len(self._past):
            for i in at:
                self._forget(int(i))
        self.known[at], self._sum[at] = max(level, 1.0), 0.0

    def pardon(self, at: int, step: int) -> None:
        """A series is healthy whatever it looks like: its present level is no news for a while."""
        level = self.levels()[at]
        self.know([at], 1.0)
        self._pardoned[at] = max(float(level), 1.0) if np.isfinite(level) else 1.0
        self._until[at] = step + self._config.pardon_steps

    def clear(self, at: Sequence[int]) -> None:
        """Some series are healthy again, whatever they have looked like until now."""
        self.know(at, 1.0)
        places = np.asarray(at, dtype=np.int64)
        self._last[:, places] = np.nan
        self._until[places] = 0

    def carried(self, places: Sequence[int | None]) -> Watch:
        """The same series in other places; None: a series that was not there."""
        other = Watch(len(places), self.over_ratio, self._config, chance=self._chance)
        for new, old in enumerate(places):
            if old is not None:
                for name in ("bias", "known", "_noise", "_pardoned", "_until"):
                    getattr(other, name)[new] = getattr(self, name)[old]
        return other


def _first_false(flags: NDArray[np.bool_]) -> int:
    """How many are true before one is not."""
    return len(flags) if flags.all() else int(np.argmin(flags))
