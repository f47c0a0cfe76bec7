"""The time of transfers between two ranks whose clocks differ by nobody knows what.

Seen from the clocks of both ends, a forward message takes its time plus the difference of the
clocks and a backward message its time minus it: half the sum is free of it, even when a clock is
set. Only messages that somebody waited for tell the time: others had arrived earlier.

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
        hops = slots.hops
        self.pairs = tuple(sorted({hop[0] for hop in hops}))
        place = {pair: i for i, pair in enumerate(self.pairs)}
        self._cell = np.array([2 * place[h[0]] + (not h[1]) for h in hops], dtype=np.int64)
        self._send = np.array([h[2] for h in hops], dtype=np.int64)
        self._receive = np.array([h[3] for h in hops], dtype=np.int64)
        self._rank_of = slots.rank_of

    def seconds(self, sample: Sample) -> Array:
        """Of each pair, the mean of both directions; NaN where a direction has no sample."""
        send, receive = self._send, self._receive
        begun_s = sample.begun_s
        # Differences of seconds since the epoch first: they lose no digits.
        apart_s = begun_s[self._rank_of[receive]] - begun_s[self._rank_of[send]]
        end_s = sample.start_s[receive] + sample.own_s[receive] + sample.wait_s[receive]
        took_s = apart_s + (end_s - sample.start_s[send])
        waited = np.isfinite(took_s) & (sample.wait_s[receive] > LEAST_WAIT_S)
        best = np.full(2 * len(self.pairs), np.inf)
        np.minimum.at(best, self._cell[waited], took_s[waited])
        best[~np.isfinite(best)] = np.nan
        return best.reshape(-1, 2).mean(axis=1)
