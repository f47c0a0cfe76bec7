"""Ratios of throughputs, and the paper's own.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log
from statistics import fmean

from resihp_ext.reproduce.case import Case, Ran, Runs
from resihp_ext.reproduce.figure import Results

OURS, JOINT = "progressive", "joint"
"""The paper's planner, and this project's own."""
LEAST = 1e-3
PAPER: dict[str, dict[str, tuple[float, float]]] = {
    "fail-stop": {"recycle": (1.22, 1.82), "oobleck": (1.07, 1.51)},
    "fail-slow": {"adaptra": (1.18, 2.30), "greyhound": (1.22, 1.46), "none": (1.32, 3.31)},
    "mixed": {"recycle": (1.48, 4.39), "recycle+": (1.22, 4.32), "oobleck+": (1.04, 3.57)},
}
"""By kind of failure and baseline: throughput of ResiHP over it."""


def ran_of(runs: Runs, policy: str) -> Ran:
    """Of one policy."""
    return next(one for one in runs.ran if one.policy == policy)


def goodput(results: Results, found: Sequence[Case], policy: str) -> float:
    """The mean over seeds."""
    return fmean(ran_of(results[case], policy).goodput_ratio for case in found)


def over(mine: float, theirs: float) -> float:
    """How many times as fast; who did nothing at all counts as a thousandth of a healthy job."""
    return max(mine, LEAST) / max(theirs, LEAST)


def geometric(values: Sequence[float]) -> float:
    """Their geometric mean."""
    return exp(fmean(log(value) for value in values))
