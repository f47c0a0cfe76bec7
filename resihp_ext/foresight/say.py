"""The answer, for people and as JSON.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from resihp_ext.foresight.question import Question
from resihp_ext.foresight.runs import Outcome, interval, ordered

HEAD = (
    "policy",
    "goodput",
    "95 %",
    "of bound",
    "tokens/day",
    "lost h",
    "deaths",
    "changes",
    "false alarms",
)
"""Of the table: goodput over a job without faults, with its 95 % confidence interval, and over what
all devices are worth; tokens a day; device-hours lost; means of counts."""

Outcomes = Mapping[str, Sequence[Outcome]]
Spares = Mapping[str, int | None]


def as_json(question: Question, outcomes: Outcomes, spares: Spares | None) -> str:
    """One line."""
    return json.dumps(
        {
            "setting": question.setting.name,
            "hours": question.until_s / 3600,
            "seeds": list(question.seeds),
            "spare_nodes": question.spare_nodes,
            "checkpoint_every_s": question.setting.times.checkpoint_every_s,
            "policies": {name: _figures(outcomes[name]) for name in outcomes},
            "spares_needed": None if spares is None else dict(spares),
        },
        sort_keys=True,
    )


def _figures(runs: Sequence[Outcome]) -> dict[str, Any]:
    goodput = tuple(one.goodput_ratio for one in runs)
    low, high = interval(goodput)
    return {
        "goodput_ratio": fmean(goodput),
        "goodput_low": low,
        "goodput_high": high,
        "goodput_ratios": list(goodput),
        "over_capacity": fmean(one.goodput_ratio / one.capacity_ratio for one in runs),
        "tokens_a_day": fmean(one.tokens_a_day for one in runs),
        "lost_device_hours": lost_hours(runs),
        "deaths": fmean(one.deaths for one in runs),
        "changes": fmean(one.changes for one in runs),
        "redone_steps": fmean(one.redone_steps for one in runs),
        "false_alarms": fmean(one.false_alarms for one in runs),
    }


def lost_hours(runs: Sequence[Outcome]) -> dict[str, float]:
    """Means over runs, by what the hours were spent on."""
    names = sorted({name for one in runs for name in one.lost_h})
    return {name: fmean(one.lost_h.get(name, 0.0) for one in runs) for name in names}


def as_text(question: Question, outcomes: Outcomes, spares: Spares | None) -> str:
    """Tables."""
    times = question.setting.times
    how = "best by Young and Daly" if question.interval_chosen else "as asked"
    lines = [
        f"{question.setting.name}: {question.until_s / 3600:g} simulated hours, "
        f"{len(question.seeds)} runs of each policy, {question.spare_nodes} spare nodes",
        f"checkpoints every {times.checkpoint_every_s:.0f} s ({how})",
        "",
    ]
    head = list(HEAD)
    if spares is not None:
        head.append(f"spare nodes for {question.goal:.1%}")
    rows = [head, *(_row(name, outcomes[name], spares) for name in ordered(outcomes))]
    widths = [max(len(row[at]) for row in rows) for at in range(len(head))]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells))
    lines += ["", "device-hours lost, in the mean of all runs"]
    for name in ordered(outcomes):
        hours = sorted(lost_hours(outcomes[name]).items(), key=lambda item: -item[1])
        parts = [f"{what} {value:,.1f}" for what, value in hours if value >= 0.05]
        lines.append(f"  {name}: {', '.join(parts) or 'none'}")
    return "\n".join(lines) + "\n"


def _row(name: str, runs: Sequence[Outcome], spares: Spares | None) -> list[str]:
    found = _figures(runs)
    row = [
        name,
        f"{found['goodput_ratio']:.2%}",
        f"{100 * found['goodput_low']:.1f} to {100 * found['goodput_high']:.1f}",
        f"{found['over_capacity']:.1%}",
        f"{found['tokens_a_day']:.3g}",
        f"{sum(found['lost_device_hours'].values()):,.0f}",
        f"{found['deaths']:.1f}",
        f"{found['changes']:.1f}",
        f"{found['false_alarms']:.1f}",
    ]
    if spares is not None:
        needed = spares[name]
        row.append("more than 8" if needed is None else str(needed))
    return row
