"""The time of transfers between two ranks whose clocks differ by nobody knows what.

Each end counts from the beginning of its own step. So a forward message seems to take its time plus
some difference, and a backward message its time minus the same: half the sum is free of it. Only
messages that somebody waited for tell the time: others had arrived earlier.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import numpy as np

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

    def seconds(self, sample: Sample) -> Array:
        """Of each pair, the mean of both directions; NaN where a direction has no sample."""
        if not self.pairs:
            return np.zeros(0)
        receive, wait_s = self._receive, sample.wait_s.take(self._receive)
        took_s = sample.start_s.take(receive) + sample.own_s.take(receive) + wait_s
        took_s -= sample.start_s.take(self._send)
        with np.errstate(invalid="ignore"):
            took_s = np.where((wait_s > LEAST_WAIT_S) & (took_s < np.inf), took_s, np.inf)
        best = np.full(2 * len(self.pairs), np.inf)
        best[self._cells] = np.minimum.reduceat(took_s, self._first)
        best[~np.isfinite(best)] = np.nan
        return np.asarray(best.reshape(-1, 2).mean(axis=1))
