"""From measured times to coefficients, by least squares of the relative errors.

Relative, because short micro-batches matter as much as long ones, and because what is reported is
the mean absolute percentage error (MAPE), as the paper does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from megatron.resilience.profile.request import Mix
from resihp_ext.cost.layer_cost import Coefficients
from resihp_ext.cost.link import Link

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """Non-negative coefficients, one a column, and how well they explain what was measured."""

    values: tuple[float, ...]
    mape_percent: float


def mixes(tokens: int, *, quick: bool = False) -> tuple[Mix, ...]:
    """Micro-batches of two sizes, from one long segment to many short ones."""
    found: list[Mix] = []
    for size in (tokens, tokens // 2):
        found += [(size,), (size // 4,) * 4, (size // 16,) * 16]
        if not quick:
            found += [(size // 2,) * 2, (size // 2, size // 4, size // 8, size // 8)]
    return tuple(found)


def fit(columns: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Explains ``seconds`` by a sum of columns, each times a coefficient that is not negative.

    The best such combination is the free optimum over some of the columns; there are few columns,
    so that all choices are tried.
    """
    measured = np.asarray(seconds, dtype=np.float64)
    table = np.asarray(columns, dtype=np.float64).T / measured[:, None]
    best, error = np.zeros(len(columns)), float("inf")
    for count in range(1, len(columns) + 1):
        for chosen in combinations(range(len(columns)), count):
            values = _free_optimum(table, chosen)
            squares = float(((table @ values - 1) ** 2).sum())
            if values.min() >= 0 and squares < error:
                best, error = values, squares
    mape = float(np.abs(table @ best - 1).mean() * 100)
    return Fit(values=tuple(best.tolist()), mape_percent=mape)


def _free_optimum(table: Float64, chosen: Sequence[int]) -> Float64:
    # Columns differ by many orders of magnitude, which would spoil the solver's notion of rank.
    part = table[:, list(chosen)]
    scale = np.abs(part).max(axis=0)
    values = np.zeros(table.shape[1])
    values[list(chosen)] = np.linalg.lstsq(part / scale, np.ones(len(part)), rcond=None)[0] / scale
    return values


def fit_layer(batches: Sequence[Mix], seconds: Sequence[float]) -> tuple[Coefficients, float]:
    """``alpha`` and ``beta`` of a layer, and the MAPE in percent.

    A constant part (launching kernels, latencies of collectives) is fitted, too, and then counted
    to the tokens of the largest micro-batch: in training all have that size.
    """
    tokens = [float(sum(mix)) for mix in batches]
    squared = [float(sum(length**2 for length in mix)) for mix in batches]
    found = fit([[1.0] * len(batches), tokens, squared], seconds)
    constant, alpha_s, beta_s = found.values
    return (
        Coefficients(alpha_s=alpha_s + constant / max(tokens), beta_s=beta_s),
        found.mape_percent,
    )


def fit_link(sizes_bytes: Sequence[int], seconds: Sequence[float]) -> tuple[Link, float]:
    """Latency and bandwidth of a link, and the MAPE in percent."""
    found = fit([[1.0] * len(seconds), list(sizes_bytes)], seconds)
    latency_s, byte_s = found.values
    # So fast that the largest message costs no more than the smallest: as good as that message.
    byte_s = byte_s or min(seconds) / max(sizes_bytes)
    return Link(latency_s=latency_s, bytes_per_s=1 / byte_s), found.mape_percent
