"""The time of micro-batches (MTP): ``alpha * N + beta * sum(l ** 2)`` a layer, fitted as it goes.

There is one fit for each kind of computation and TP degree, shared by all ranks, so that a slow one
is outvoted: layers are counted, embedding and head have coefficients of their own. A fit is
weighted least squares over decaying sums (bounded memory), weights are Huber's, and where the data
do not tell coefficients apart, a weak pull to the cost model's proportions does.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from resihp_ext.detector.slots import KINDS, Array, Ints, Role, Sample, Slots

FIRST_ROWS = 2048
"""Of one step in a fit that has not settled."""
LATER_ROWS = 512
"""In one that has: other ones in each step, and the decaying sums keep thousands."""
SETTLED = 20
"""Steps after which a fit has settled."""
HUBER = 0.03
"""Relative errors beyond this one weigh less."""
PULL = 1e-3
"""Weight of the hint beside the data."""


class Fit:
    """Coefficients of one role."""

    def __init__(self, hint: Array | None) -> None:
        # Without a hint, what may be the layers' or the ends' is the layers'.
        self._hint = np.array([1.0, 0.0, 0.0, 0.0]) if hint is None else hint
        self._gram, self._moment = np.zeros((4, 4)), np.zeros(4)
        self.coefficients: Array | None = None
        self._taken = 0

    def choose(self, rows: Ints) -> Ints:
        """Some rows of a step, as many as the fit's next step needs."""
        most = FIRST_ROWS if self._taken < SETTLED else LATER_ROWS
        if len(rows) <= most:
            return rows
        # Other ones each time, whatever repeats in their order.
        places = np.linspace(0, len(rows), most, endpoint=False).astype(np.int64)
        return rows[(places + 7 * self._taken) % len(rows)]

    def add(self, x: Array, y_s: Array, decay: float) -> None:
        """Takes rows, weighted by how well they agree with the fit so far."""
        good = np.isfinite(y_s) & (y_s > 0) & np.isfinite(x).all(axis=1)
        x, y_s = x[good], y_s[good]
        if not len(y_s):
            return
        self._taken += 1
        # Errors count relative to the time, like the noise.
        x = x / y_s[:, None]
        rounds = 1 if self.coefficients is not None else 12
        gram, moment = self._gram, self._moment
        for turn in range(rounds):
            weights = np.ones(len(x))
            if self.coefficients is not None:
                error = np.abs(x @ self.coefficients - 1)
                width = max(HUBER, 1.5 * float(np.median(error))) if turn else HUBER
                # Beyond three widths a sample has no say at all.
                weights = np.where(error > 3 * width, 0.0, width / np.maximum(error, width))
            weighted = x * weights[:, None]
            self._gram = decay * gram + weighted.T @ x
            self._moment = decay * moment + weighted.sum(axis=0)
            self._solve()

    def _solve(self) -> None:
        scale = np.sqrt(np.diag(self._gram))
        used = scale > 0
        scale = np.where(used, scale, 1.0)
        gram = self._gram / np.outer(scale, scale)
        target = self._moment / scale
        hint = self._hint * scale
        size = float(hint @ gram @ hint)
        pull = hint * float(hint @ target) / size if size > 0 else np.zeros(4)
        left = gram + PULL * np.eye(4) * used + np.diag(~used)
        coefficients = _not_negative(left, target + PULL * pull * used) / scale * used
        if self._hint[0] > 0:
            ratio = coefficients[0] / self._hint[0]
            coefficients = np.where(used, coefficients, self._hint * max(ratio, 0.0))
        self.coefficients = coefficients


def _not_negative(gram: Array, target: Array) -> Array:
    """The solution without what would be negative: nothing takes less than no time.

    So where an end is not told from layers, the faster of both ends has layers alone, instead of
    layers that are too slow and a negative embedding.
    """
    free = np.ones(len(target), dtype=bool)
    while True:
        left = np.where(np.outer(free, free), gram, np.eye(len(target)))
        solved = np.linalg.solve(left, np.where(free, target, 0.0))
        if (solved >= 0).all():
            return solved
        free[int(np.argmin(solved))] = False


class MicroBatchPredictor:
    """Fits of all roles."""

    def __init__(self, hints: Mapping[Role, Array] | None = None) -> None:
        """Begins.

        Args:
            hints: Coefficients of a cost model, by role; only their proportions matter where there
                are data.
        """
        self._hints = dict(hints or {})
        self._fits: dict[Role, Fit] = {}

    def learn(
        self,
        slots: Slots,
        sample: Sample,
        trusted: Array,
        decay: float = 1.0,
        roles: Collection[Role] | None = None,
    ) -> None:
        """Takes what trusted ranks (true in an array over ranks) have measured, of some roles."""
        everyone = bool(trusted.all())
        for role in slots.roles if roles is None else roles:
            mine = slots.role_slots[role]
            fit = self._fits.setdefault(role, Fit(self._hints.get(role)))
            chosen = fit.choose(mine if everyone else mine[trusted[slots.rank_of[mine]]])
            fit.add(slots.features(slots.node_of[chosen], sample), sample.own_s[chosen], decay)

    def coefficients(self, role: Role) -> Array:
        """Of a role: as fitted, or those of the nearest TP degree, scaled; NaN if there is none."""
        fit = self._fits.get(role)
        if fit and fit.coefficients is not None:
            return fit.coefficients
        kind, tp = role
        known = {
            t: f.coefficients
            for (k, t), f in self._fits.items()
            if k == kind and f.coefficients is not None
        }
        if not known:
            return self._hints.get(role, np.full(4, np.nan))
        near = min(known, key=lambda t: (abs(np.log(t / tp)), t))
        here, there = self._hints.get(role), self._hints.get((kind, near))
        if here is None or there is None:
            return np.asarray(known[near] * near / tp)
        ratio = np.divide(here, there, out=np.full(4, near / tp), where=there > 0)
        return np.asarray(known[near] * ratio)

    def predict_s(self, slots: Slots, sample: Sample) -> Array:
        """Own time of every node on a healthy device; NaN where nothing is computed."""
        predicted = np.full(slots.nodes, np.nan)
        for role, mine in slots.roles.items():
            predicted[mine] = slots.role_features(role, sample) @ self.coefficients(role)
        return predicted

    def describe(self) -> dict[str, list[float]]:
        """Coefficients by the name of the role, ``F tp2``."""
        return {
            f"{KINDS[kind].value} tp{tp}": self.coefficients((kind, tp)).tolist()
            for kind, tp in self._fits
        }
