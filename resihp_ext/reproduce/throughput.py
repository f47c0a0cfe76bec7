"""Throughput of every system in every configuration and scenario.

PAPER: fail-stop only, fail-slow only (weak, medium, severe) and mixed failures, over ReCycle,
Oobleck, Adaptra, Greyhound, no mitigation and the strengthened baselines. Which of the paper's
numbers (Figures 9, 10, 14, Table 6) shows which is our reading.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean

from resihp_ext.reproduce import sweep
from resihp_ext.reproduce.case import Case
from resihp_ext.reproduce.figure import Bars, Claim, Figure, Part, Results, Scale
from resihp_ext.reproduce.ratios import JOINT, OURS, PAPER, goodput, over, ran_of
from resihp_ext.reproduce.scenarios import MIXED, SLOW, STOP, Scenario
from resihp_ext.simulator.policies.registry import POLICIES
from resihp_ext.simulator.presets import CONFIGURATIONS

COLUMNS = (
    *("configuration", "devices", "scenario", "policy", "goodput", "least", "most"),
    *("tokens_per_s", "waited_s", "stood_s", "changes", "alarms", "false_alarms", "redone"),
    *("capacity", "progressive_over_it", "joint_over_it"),
)


def configurations(scale: Scale) -> tuple[str, ...]:
    """Names of those that are run."""
    if scale.small:
        return ("llama2-7b-8k", "llama2-13b-16k")
    return tuple(CONFIGURATIONS)


def cases(scale: Scale, scenarios: Iterable[Scenario]) -> list[Case]:
    """Every configuration and seed."""
    return [
        Case(configuration=one, scenario=scenario, seed=seed, policies=tuple(POLICIES))
        for one in configurations(scale)
        for scenario in scenarios
        for seed in range(scale.seeds)
    ]


def rows(results: Results, found: Sequence[Case]) -> list[tuple[object, ...]]:
    """A row for each configuration, scenario and policy, in :data:`COLUMNS`."""
    made = []
    for (name, scenario), mine in grouped(found).items():
        best = {one: goodput(results, mine, one) for one in (OURS, JOINT)}
        bound = fmean(results[case].capacity_ratio for case in mine)
        for policy in mine[0].policies:
            ran = [ran_of(results[case], policy) for case in mine]
            value = fmean(one.goodput_ratio for one in ran)
            means = (fmean(getattr(one, field) for one in ran) for field in COLUMNS[7:14])
            made.append(
                (
                    *(name, CONFIGURATIONS[name].devices, scenario, policy, value),
                    min(one.goodput_ratio for one in ran),
                    max(one.goodput_ratio for one in ran),
                    *means,
                    *(bound, over(best[OURS], value), over(best[JOINT], value)),
                )
            )
    return made


def grouped(found: Iterable[Case]) -> dict[tuple[str, str], list[Case]]:
    """Seeds together: by configuration and scenario."""
    groups: dict[tuple[str, str], list[Case]] = {}
    for case in found:
        groups.setdefault((case.configuration, case.scenario.name), []).append(case)
    return groups


def claims(kind: str, scale: Scale, results: Results, found: Sequence[Case]) -> list[Claim]:
    """The paper's ranges of this kind of failure."""
    made = []
    for theirs, paper in PAPER[kind].items():
        if theirs in POLICIES:
            values = tuple(sweep.ratio(results, mine, theirs) for mine in grouped(found).values())
            quantity = f"throughput over {theirs}, {kind}"
            one = Claim(quantity=quantity, values=values, paper=paper, unit="x")
            reasons = (_ends(values, found), sweep.why(one, kind, theirs, scale, results))
            made.append(replace(one, why="" if one.within else " ".join(filter(None, reasons))))
    return made


def _ends(values: Sequence[float], found: Sequence[Case]) -> str:
    """Where the ratio is least, and where largest."""
    named = sorted(zip(values, grouped(found), strict=True))
    (low, least), (high, most) = named[0], named[-1]
    return f"Least ({low:.2f}x) on {' '.join(least)}, largest ({high:.2f}x) on {' '.join(most)}."


def charts(results: Results, found: Sequence[Case]) -> list[Bars]:
    """A chart for each scenario: configurations side by side."""
    made = []
    for scenario in dict.fromkeys(case.scenario.name for case in found):
        groups = {n: mine for (n, s), mine in grouped(found).items() if s == scenario}
        series = tuple(
            (policy, tuple(goodput(results, mine, policy) for mine in groups.values()))
            for policy in found[0].policies
        )
        title = f"Throughput over a healthy job: {scenario}"
        made.append(Bars(title=title, unit="", groups=tuple(groups), series=series))
    return made


def _tasks(kind: str, scenarios: tuple[Scenario, ...], scale: Scale) -> list[Case]:
    return cases(scale, scenarios) + sweep.tasks(scale, [kind])


def _make(
    kind: str, scenarios: tuple[Scenario, ...], part: Part, scale: Scale, results: Results
) -> Figure:
    found = cases(scale, scenarios)
    return Figure(
        name=part.name,
        title=part.title,
        source=part.source,
        columns=COLUMNS,
        rows=tuple(rows(results, found)),  # type: ignore[arg-type]
        claims=tuple(claims(kind, scale, results, found)),
        charts=tuple(charts(results, found)),
        notes=(
            f"{scale.seeds} draws of faults of each case. Goodput: iterations that count, times "
            "the time of a healthy one, over the time from the first fault to the end, standstills "
            "included. Capacity: the mean of all devices' throughputs.",
        ),
    )


def _part(kind: str, title: str, source: str, scenarios: tuple[Scenario, ...]) -> Part:
    return Part(
        name=kind,
        title=title,
        source=source,
        tasks=partial(_tasks, kind, scenarios),
        make=partial(_make, kind, scenarios),
    )


FAIL_STOP = _part("fail-stop", "Throughput under dead devices", "Figure 9", (STOP,))
FAIL_SLOW = _part("fail-slow", "Throughput under slow devices and links", "Figure 10", SLOW)
MIXED_PART = _part("mixed", "Throughput under both", "Table 6", (MIXED,))
