"""Bayesian online change-point detection of one series (Adams and MacKay 2007, arXiv 0710.3742).

Observations between two change points are normal with unknown mean and variance under a
Normal-Inverse-Gamma prior, so that predictions are Student's t. The prior comes from the first
observations, run lengths are truncated, and the hazard is constant.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class BocdConfig:
    """Settings of :class:`Bocd`; the defaults are those published for the Greyhound baseline."""

    hazard_steps: float = 250.0
    """Expected steps between change points: the hazard is one over this."""
    prior_steps: int = 30
    """Observations from which the prior is made."""
    recent_steps: int = 10
    """A run shorter than this is a new one."""
    alarm_probability: float = 0.8
    """Of a new run, for an alarm."""
    longest_run_steps: int = 300


class Bocd:
    """The run-length posterior of one series."""

    def __init__(self, config: BocdConfig | None = None) -> None:
        self._config = config or BocdConfig()
        self._first: list[float] = []
        self._log_p: Array = np.zeros(1)
        self._tables()
        self._mean: Array = np.zeros(1)
        self._beta: Array = np.ones(1)
        self._prior: tuple[float, float] = (0.0, 1.0)
        self._alarmed = True

    def _tables(self) -> None:
        runs = np.arange(self._config.longest_run_steps + 1)
        self._kappa, self._alpha = 1.0 + runs, 2.0 + runs / 2
        half = [math.lgamma(a + 0.5) - math.lgamma(a) for a in self._alpha]
        self._constant = np.array(half) - 0.5 * np.log(2 * np.pi * self._alpha)

    @property
    def settled(self) -> bool:
        """Whether the prior is there."""
        return len(self._first) >= self._config.prior_steps

    def run_lengths(self) -> Array:
        """Probability of each run length, of the truncated last one and all beyond together."""
        return np.asarray(np.exp(self._log_p))

    def observe(self, value: float) -> int | None:
        """Takes the next observation.

        Returns:
            At the beginning of an alarm, the most probable length of the new run; else None.
        """
        if not math.isfinite(value):
            return None
        if not self.settled:
            self._first.append(value)
            if self.settled:
                self._settle()
            return None
        self._update(value)
        recent = self._log_p[: self._config.recent_steps]
        alarm = float(np.exp(recent).sum()) > self._config.alarm_probability
        begins = alarm and not self._alarmed
        self._alarmed = alarm
        return max(int(np.argmax(recent)), 1) if begins else None

    def _settle(self) -> None:
        first = np.array(self._first)
        center = float(np.median(first))
        spread = 1.4826 * float(np.median(np.abs(first - center)))
        spread = max(spread, 1e-3 * abs(center), 1e-12)
        self._prior = (center, spread * spread)
        self._mean, self._beta = np.array([center]), np.array([spread * spread])
        for value in self._first:
            self._update(value)
        self._alarmed = True

    def _update(self, value: float) -> None:
        n = len(self._log_p)
        kappa, alpha = self._kappa[:n], self._alpha[:n]
        scale = self._beta * (kappa + 1) / (alpha * kappa)
        gap = value - self._mean
        log_like = self._constant[:n] - 0.5 * np.log(scale)
        log_like -= (alpha + 0.5) * np.log1p(gap * gap / (2 * alpha * scale))
        hazard = 1 / self._config.hazard_steps
        joint = self._log_p + log_like
        new = _log_sum(joint) + math.log(hazard)
        log_p = np.concatenate(([new], joint + math.log1p(-hazard)))
        beta = self._beta + kappa * gap * gap / (2 * (kappa + 1))
        mean = self._mean + gap / (kappa + 1)
        self._mean = np.concatenate(([self._prior[0]], mean))
        self._beta = np.concatenate(([self._prior[1]], beta))
        limit = self._config.longest_run_steps
        if len(log_p) > limit:
            log_p[limit - 1] = np.logaddexp(log_p[limit - 1], log_p[limit])
            log_p, self._mean, self._beta = log_p[:limit], self._mean[:limit], self._beta[:limit]
        self._log_p = log_p - _log_sum(log_p)


def _log_sum(logs: Array) -> float:
    """Logarithm of the sum of exponentials."""
    most = float(logs.max())
    return most + math.log(float(np.exp(logs - most).sum()))


class Window:
    """The last values of a series by number, for verification."""

    def __init__(self, length: int) -> None:
        self._values: deque[float] = deque(maxlen=length)

    def add(self, value: float) -> None:
        """Appends one."""
        self._values.append(value)

    def sides(self, newest: int) -> tuple[list[float], list[float]]:
        """All but the newest ones, and the newest ones."""
        values = list(self._values)
        return values[:-newest], values[-newest:]
