"""Throughput while devices die at a fixed pace and nobody repairs them.

PAPER: failures come down to one every 30 minutes, "where ReCycle and Oobleck stop training and
ResiHP goes on". A policy has stopped when no layout of it holds the model any more.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean

from resihp_ext.reproduce.case import Case
from resihp_ext.reproduce.figure import Claim, Figure, Lines, Part, Results, Scale
from resihp_ext.reproduce.ratios import OURS, ran_of
from resihp_ext.reproduce.scenarios import FREQUENCIES, FREQUENCIES_MINUTES
from resihp_ext.simulator.policies.registry import POLICIES

CONFIGURATIONS = ("llama2-13b-16k", "llama2-30b-16k")
STOPPING = ("recycle", "oobleck")
COLUMNS = ("configuration", "minutes", "policy", "goodput", "stopped", "waited_s", "capacity")


def _cases(scale: Scale) -> dict[tuple[str, int], list[Case]]:
    names = CONFIGURATIONS[:1] if scale.small else CONFIGURATIONS
    paces = list(zip(FREQUENCIES_MINUTES, FREQUENCIES, strict=True))
    return {
        (name, minutes): [
            Case(configuration=name, scenario=scenario, seed=seed, policies=tuple(POLICIES))
            for seed in range(scale.seeds)
        ]
        for name in names
        for minutes, scenario in (paces[-1:] if scale.small else paces)
    }


def tasks(scale: Scale) -> list[Case]:
    """Every pace."""
    return [case for cases in _cases(scale).values() for case in cases]


def make(part: Part, scale: Scale, results: Results) -> Figure:
    """Goodput by configuration, pace and policy."""
    found = _cases(scale)
    rows = []
    for (name, minutes), cases in found.items():
        bound = fmean(results[case].capacity_ratio for case in cases)
        for policy in POLICIES:
            ran = [ran_of(results[case], policy) for case in cases]
            goodput = fmean(one.goodput_ratio for one in ran)
            stopped = fmean(one.waited_s > 0 for one in ran)
            waited_s = fmean(one.waited_s for one in ran)
            rows.append((name, minutes, policy, goodput, stopped, waited_s, bound))
    charts = [_chart(name, rows) for name in dict.fromkeys(name for name, _ in found)]
    claims = []
    for theirs in STOPPING:
        # Of runs at the fastest pace: the part in which ours goes on and theirs does not.
        last = [row for row in rows if row[1] == FREQUENCIES_MINUTES[-1]]
        by = {(row[0], row[2]): float(row[4]) for row in last}
        values = tuple(by[name, theirs] for name, policy in by if policy == theirs)
        if values:
            claims.append(
                Claim(
                    quantity=f"runs in which {theirs} stops, a death every 30 min",
                    values=values,
                    paper=(1.0, 1.0),
                )
            )
    mine = tuple(float(row[4]) for row in rows if row[2] == OURS and row[1] == 30)
    claims.append(
        Claim(
            quantity="runs in which ResiHP stops, a death every 30 min", values=mine, paper=(0, 0)
        )
    )
    return Figure(
        name=part.name,
        title=part.title,
        source=part.source,
        columns=COLUMNS,
        rows=tuple(rows),
        claims=tuple(claims),
        charts=tuple(charts),
        notes=(
            "Six hours from the first death on; nothing is repaired, so that twelve devices are "
            "dead in the end at one every 30 minutes. Stopped: part of the runs in which no layout "
            "of the policy held the model at some time.",
        ),
    )


def _chart(name: str, rows: list[tuple[str, int, str, float, float, float, float]]) -> Lines:
    mine = [row for row in rows if row[0] == name]
    x = tuple(sorted({row[1] for row in mine}))
    by = {(row[2], row[1]): row[3] for row in mine}
    return Lines(
        title=f"Throughput over a healthy job, {name}",
        unit="goodput",
        across="minutes from one death to the next",
        x=tuple(map(float, x)),
        series=tuple((policy, tuple(map(partial(_at, by, policy), x))) for policy in POLICIES),
    )


def _at(by: dict[tuple[str, int], float], policy: str, minutes: int) -> float:
    return by[policy, minutes]


FREQUENCY = Part(
    name="frequency",
    title="Throughput by frequency of deaths",
    source="Figure 14",
    tasks=tasks,
    make=make,
)
