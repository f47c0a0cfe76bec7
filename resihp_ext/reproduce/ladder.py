"""Ours over the paper's planner over every baseline, and how far all are from the bound.

Not in the paper. The same runs as in the throughput figures.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.reproduce.case import Case
from resihp_ext.reproduce.figure import Bars, Cell, Figure, Part, Results, Scale
from resihp_ext.reproduce.ratios import JOINT, OURS, geometric, goodput, over
from resihp_ext.reproduce.scenarios import SCENARIOS
from resihp_ext.reproduce.throughput import cases, grouped
from resihp_ext.simulator.policies.registry import POLICIES

COLUMNS = (
    *("scenario", "policy", "joint_over_it", "joint_over_it_worst", "worst_at"),
    *("progressive_over_it", "progressive_over_it_worst", "of_capacity", "of_capacity_worst"),
)


def tasks(scale: Scale) -> list[Case]:
    """Those of the throughput figures."""
    return cases(scale, SCENARIOS)


def make(part: Part, scale: Scale, results: Results) -> Figure:
    """Geometric mean and worst case of every ratio by scenario, and over all scenarios."""
    groups = grouped(tasks(scale))
    names = [one.name for one in SCENARIOS]
    rows: list[tuple[Cell, ...]] = []
    for scenario in (*names, "all"):
        mine = {k: found for k, found in groups.items() if scenario in (k[1], "all")}
        rows += [_row(scenario, policy, mine, results) for policy in POLICIES]
    lost = [row for row in rows if row[0] != "all" and row[1] != JOINT and float(row[3] or 1) < 1]
    series = tuple(
        (policy, tuple(float(row[7] or 0) for row in rows if row[1] == policy))
        for policy in POLICIES
    )
    return Figure(
        name=part.name,
        title=part.title,
        source=part.source,
        columns=COLUMNS,
        rows=tuple(rows),
        charts=(
            Bars(
                title="Throughput over the capacity bound, geometric mean",
                unit="",
                groups=(*names, "all"),
                series=series,
            ),
        ),
        notes=(_said(rows), _lost(lost)),
    )


def _row(
    scenario: str, policy: str, groups: dict[tuple[str, str], list[Case]], results: Results
) -> tuple[Cell, ...]:
    joint, ours, bound = {}, {}, {}
    for key, found in groups.items():
        value = goodput(results, found, policy)
        joint[key] = over(goodput(results, found, JOINT), value)
        ours[key] = over(goodput(results, found, OURS), value)
        capacity = sum(results[case].capacity_ratio for case in found) / len(found)
        bound[key] = over(value, capacity)
    worst = min(joint, key=lambda key: joint[key])
    return (
        *(scenario, policy, geometric(list(joint.values())), joint[worst], " ".join(worst)),
        *(geometric(list(ours.values())), min(ours.values())),
        *(geometric(list(bound.values())), min(bound.values())),
    )


def _said(rows: list[tuple[Cell, ...]]) -> str:
    every = {str(row[1]): row for row in rows if row[0] == "all"}
    over_ours, of_bound = every[OURS][2], every[JOINT][7]
    others = "; ".join(
        f"{name} {float(row[2] or 0):.2f}x (worst {float(row[3] or 0):.2f}x)"
        for name, row in every.items()
        if name not in (JOINT, OURS)
    )
    return (
        f"Over all scenarios and configurations joint is {float(over_ours or 0):.3f}x progressive "
        f"(worst {float(every[OURS][3] or 0):.3f}x, {every[OURS][4]}), and reaches "
        f"{float(of_bound or 0):.1%} of the capacity bound, geometric means. Over the baselines: "
        f"{others}. Who did nothing at all counts as a thousandth of a healthy job."
    )


def _lost(lost: list[tuple[Cell, ...]]) -> str:
    if not lost:
        return "In no case was another policy faster than joint."
    named = "; ".join(f"{row[1]}, {row[4]}: {float(row[3] or 0):.3f}x" for row in lost)
    return f"Where another policy was faster than joint, the worst case of each scenario: {named}."


LADDER = Part(
    name="ladder",
    title="joint over progressive over every baseline, and the capacity bound",
    source="not in the paper",
    tasks=tasks,
    make=make,
)
