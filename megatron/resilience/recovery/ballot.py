"""Finds out on the side whether all members know the same: as three numbers in a sum over all."""

from __future__ import annotations

from megatron.resilience.executor.guard import Figures

FIGURES = 3


def vote(number: int) -> Figures:
    """What this rank knows, by its number; 0: nothing."""
    value = float(number)
    return float(number > 0), value, value * value


def unanimous(sums: Figures, everyone: int) -> bool:
    """Whether all have voted for the same: if and only if equality holds in the inequality of
    Cauchy and Schwarz.

    Args:
        sums: Of the votes of all members.
        everyone: How many these are.
    """
    known, numbers, squares = sums
    return known == everyone and known * squares == numbers * numbers
