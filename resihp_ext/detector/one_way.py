"""The time of transfers that are waited for in one direction alone.

Where a stage is much slower than its neighbour, messages of one direction have always arrived
before anybody waits for them, and half the sum of both (``transfers.py``) is never known. What is
left is one direction by the clocks of both ends: the time on the wire, and how much the clocks
differ. Ranks of a node have one clock. Between nodes, the usual difference is taken off: a message
that takes longer than it used to shows as well. A clock that was set must not look like that:
everybody leaves SYNC at nearly the same moment, and if the ends' moments have moved apart, it was
the clocks.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from resihp_ext.detector.slots import Array, Ints, Sample, Slots, medians
from resihp_ext.plan.action import Kind

TWO_WAY = 0.5
"""Part of the first steps in which both directions tell something, for a link to need no clocks."""
ONE_WAY = 0.75
"""Part of them in which one does, for that one to be judged."""
SET_STEPS, SLEWED_STEPS = 3, 12
"""Over which the median of what clocks have moved is taken: at once, and little by little."""
SET_NOISE = 4.0
"""A clock was set when it has moved by this many times the noise of leaving SYNC."""


class OneWay:
    """Those links of a plan of which one direction tells something, and the other one does not."""

    def __init__(self, slots: Slots, pairs: tuple[tuple[int, int], ...]) -> None:
        """Begins with none: see :meth:`settle`."""
        self._pairs = pairs
        node_of = {device.rank: device.node for device in slots.plan.devices}
        self._near = np.array([node_of[a] == node_of[b] for a, b in pairs], dtype=bool)
        self._ends = np.array([[slots.index_of[r] for r in pair] for pair in pairs]).reshape(-1, 2)
        self._sync = np.array([_sync_slot(slots, rank) for rank in slots.ranks], dtype=np.int64)
        self.at: Ints = np.zeros(0, dtype=np.int64)
        """Which pairs these are."""
        self._cells = self._source = self._target = self.at
        self._shift_s = self._usual_apart_s = np.zeros(0)
        self._noise_s = self._shift_s
        self._apart: deque[Array] = deque(maxlen=SLEWED_STEPS)

    def settle(self, samples: list[Sample], ways_s: Array, fallback_s: Array) -> None:
        """Finds the links, and what is usual of them.

        Args:
            ways_s: Times of all pairs by step and direction, shape (steps, pairs, 2); NaN where
                there is none.
            fallback_s: Of each pair, the time on the wire where no other link tells it.
        """
        told = np.isfinite(ways_s)
        parts = told.mean(axis=0)
        one = (told.all(axis=2).mean(axis=0) < TWO_WAY) & (parts.max(axis=1) >= ONE_WAY)
        self.at = np.flatnonzero(one)
        back = parts[self.at].argmax(axis=1)
        self._cells = 2 * self.at + back
        ends = self._ends[self.at]
        rows = np.arange(len(ends))
        self._source, self._target = ends[rows, back], ends[rows, 1 - back]
        both_s = medians(ways_s.mean(axis=2))
        both_s[self.at] = np.nan
        wire_s = np.where(self._near, _middle(both_s, self._near), _middle(both_s, ~self._near))
        wire_s = np.where(np.isfinite(wire_s), wire_s, fallback_s)[self.at]
        flat = ways_s.reshape(len(ways_s), -1)[:, self._cells]
        raw_s = flat + np.array([self._begun_apart_s(sample) for sample in samples])
        usual_s = medians(raw_s) - wire_s
        self._shift_s = np.where(self._near[self.at], 0.0, usual_s)
        apart_s = np.array([self._synced_apart_s(sample) for sample in samples])
        self._usual_apart_s = medians(apart_s)
        self._noise_s = 1.4826 * medians(np.abs(apart_s - self._usual_apart_s))
        found_s = np.array(
            [self.seconds(s, w.ravel()) for s, w in zip(samples, ways_s, strict=True)]
        )
        self._shift_s += np.where(self._near[self.at], 0.0, medians(found_s) - wire_s)

    def seconds(self, sample: Sample, ways_s: Array) -> Array:
        """Of each link in :attr:`at`, the time of a step.

        Args:
            ways_s: Of all pairs, one after the other, both directions.
        """
        took_s = ways_s[self._cells] + self._begun_apart_s(sample) - self._shift_s
        self._apart.append(self._synced_apart_s(sample) - self._usual_apart_s)
        return np.asarray(took_s - np.where(self._near[self.at], 0.0, self._moved_s(took_s)))

    def _moved_s(self, took_s: Array) -> Array:
        """By how much clocks make messages look longer: as far as they were set, or slewed."""
        moved_s = medians(np.array(self._apart))
        now_s = medians(np.array(self._apart)[-SET_STEPS:])
        late = np.where(now_s > SET_NOISE * self._noise_s, now_s, moved_s)
        # What arrives before it was sent is proof of a set clock; less may be the noise of SYNC.
        return np.where(took_s < 0, np.fmin(now_s, 0.0), np.fmax(late, 0.0))

    def _begun_apart_s(self, sample: Sample) -> Array:
        return np.asarray(sample.begun_s.take(self._target) - sample.begun_s.take(self._source))

    def _synced_apart_s(self, sample: Sample) -> Array:
        """How much later a link's receiver has left SYNC, by the clocks of both."""
        target, source = self._sync.take(self._target), self._sync.take(self._source)
        synced_s = sample.start_s + sample.own_s + sample.wait_s
        return self._begun_apart_s(sample) + synced_s.take(target) - synced_s.take(source)


def _middle(seconds: Array, chosen: Array) -> float:
    found = seconds[chosen & np.isfinite(seconds)]
    return float(np.median(found)) if len(found) else float("nan")


def _sync_slot(slots: Slots, rank: int) -> int:
    kinds = [kind for kind, _, _ in slots.keys[slots.host_of_rank[rank]]]
    return slots.first_slot[slots.index_of[rank]] + kinds.index(Kind.SYNC)
