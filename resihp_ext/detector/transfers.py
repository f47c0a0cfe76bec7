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

from resihp_ext.detector.slots import Array, Sample, Slots

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
        cells, self._first = np.unique(table[:, 0], return_index=True)
        self.messages: Array = np.bincount(table[:, 0] // 2, minlength=len(self.pairs)).astype(
            float
        )
        """Of each pair in a step, both directions together."""
        self._cells, self._send, self._receive = cells, table[:, 1], table[:, 2]
        self._usual = np.zeros(len(cells))

    def settle(self, samples: Sequence[Sample]) -> None:
        """Learns how many messages of each direction are usually waited for."""
        if self.pairs:
            counts = [np.add.reduceat(self._waited(s), self._first, dtype=float) for s in samples]
            self._usual = np.median(counts, axis=0)

    def _waited(self, sample: Sample) -> NDArray[np.bool_]:
        with np.errstate(invalid="ignore"):
            return np.asarray(sample.wait_s.take(self._receive) > LEAST_WAIT_S)

    def seconds(self, sample: Sample) -> Array:
        """Of each pair, the mean of both directions; NaN where a direction has too few samples.

        The least of a few messages is more than that of many, where their times have heavy tails:
        a direction that tells less than half as many as usually, since a rank at its end is late
        with something else, tells nothing.
        """
        if not self.pairs:
            return np.zeros(0)
        receive, waited = self._receive, self._waited(sample)
        took_s = sample.start_s.take(receive) + sample.own_s.take(receive)
        took_s += sample.wait_s.take(receive)
        took_s -= sample.start_s.take(self._send)
        with np.errstate(invalid="ignore"):
            took_s = np.where(waited & (took_s < np.inf), took_s, np.inf)
        least_s = np.minimum.reduceat(took_s, self._first)
        few = 2 * np.add.reduceat(waited, self._first, dtype=float) < self._usual
        least_s[few | ~np.isfinite(least_s)] = np.nan
        best = np.full(2 * len(self.pairs), np.nan)
        best[self._cells] = least_s
        return np.asarray(best.reshape(-1, 2).mean(axis=1))
