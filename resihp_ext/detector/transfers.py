"""The time of transfers between two ranks whose clocks differ by nobody knows what.

Each end counts from the beginning of its own step. So a forward message seems to take its time plus
some difference, and a backward message its time minus the same: half the sum is free of it. Only
messages that somebody waited for tell the time: others had arrived earlier.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from resihp_ext.detector.one_way import OneWay
from resihp_ext.detector.slots import Array, Ints, Sample, Slots

LEAST_WAIT_S = 2e-5
"""Who waits for less than this has found the message there."""


class Transfers:
    """Transfers of one plan, by pairs of ranks."""

    def __init__(self, slots: Slots) -> None:
        self.pairs = tuple(sorted({hop[0] for hop in slots.hops}))
        place = {pair: i for i, pair in enumerate(self.pairs)}
        # A cell is a direction of a pair: forward, then backward.
        hops = sorted((2 * place[h[0]] + (not h[1]), h[2], h[3]) for h in slots.hops)
        table = np.array(hops, dtype=np.int64).reshape(-1, 3)
        cells, first, counts = np.unique(table[:, 0], return_index=True, return_counts=True)
        self.messages: Array = np.bincount(table[:, 0] // 2, minlength=len(self.pairs)).astype(
            float
        )
        """Of each pair in a step, both directions together."""
        # A column for each cell; shorter ones repeat their last message.
        rows = np.arange(counts.max(initial=0))[:, None]
        at = first + np.minimum(rows, counts - 1)
        self._cells, self._all_cells = cells, len(cells) == 2 * len(self.pairs)
        self._send: Ints = np.ascontiguousarray(table[at, 1])
        self._receive: Ints = np.ascontiguousarray(table[at, 2])
        self._repeated = None if (counts == len(rows)).all() else rows >= counts
        self._enough = np.zeros(len(cells), dtype=np.int64)
        self._one_way = OneWay(slots, self.pairs)

    def settle(self, samples: Sequence[Sample], fallback_s: Array) -> None:
        """Learns how many messages of each direction are usually waited for, and which directions.

        Args:
            fallback_s: See :meth:`OneWay.settle`.
        """
        if self.pairs:
            counts = np.array([self._least(sample)[1] for sample in samples])
            self._enough = np.ceil(np.median(counts, axis=0) / 2).astype(np.int64)
            ways_s = np.array([self._ways_s(sample) for sample in samples])
            self._one_way.settle(list(samples), ways_s.reshape(len(samples), -1, 2), fallback_s)

    def _least(self, sample: Sample) -> tuple[Array, Ints]:
        """Of each cell, the least time, and how many messages were waited for; inf where none."""
        end_s = sample.start_s + sample.own_s
        end_s += sample.wait_s
        took_s = end_s.take(self._receive)
        took_s -= sample.start_s.take(self._send)
        with np.errstate(invalid="ignore"):
            missed = ~(sample.wait_s.take(self._receive) > LEAST_WAIT_S)
            missed |= ~(took_s < np.inf)
        np.copyto(took_s, np.inf, where=missed)
        if self._repeated is not None:
            missed |= self._repeated
        return took_s.min(axis=0), len(missed) - missed.sum(axis=0, dtype=np.int64)

    def seconds(self, sample: Sample) -> Array:
        """Of each pair, the mean of both directions, or what tells the time of one; NaN where a
        direction has too few samples.

        The least of a few messages is more than that of many, where their times have heavy tails:
        a direction that tells less than half as many as usually, since a rank at its end is late
        with something else, tells nothing.
        """
        if not self.pairs:
            return np.zeros(0)
        ways_s = self._ways_s(sample)
        found: Array = (ways_s[0::2] + ways_s[1::2]) / 2
        if len(self._one_way.at):
            found[self._one_way.at] = self._one_way.seconds(sample, ways_s)
        return found

    def _ways_s(self, sample: Sample) -> Array:
        """Of each pair, forward and backward, by the clocks of both ends' steps."""
        least_s, counts = self._least(sample)
        silent: NDArray[np.bool_] = (counts < self._enough) | ~np.isfinite(least_s)
        least_s[silent] = np.nan
        if self._all_cells:
            return least_s
        best = np.full(2 * len(self.pairs), np.nan)
        best[self._cells] = least_s
        return best
