"""Every change of the layout: why, how long, what moved, and the layout before and after.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math

from resihp_ext.report.cells import cells
from resihp_ext.report.page import Cell, figure, paragraph, section, table
from resihp_ext.report.run import Entry, Run
from resihp_ext.report.strips import Stack, stacks

FULL = 12
"""Changes that are shown with their layouts; of more, the first and the last."""
DRAWN = 7
"""Phases that are drawn, the longest ones; all others are one, for colours must be told apart."""


def overview(run: Run) -> str:
    """All of them in one table, and their phases as bars."""
    if not run.receipts:
        return ""
    rows: list[list[Cell]] = [
        [
            number,
            int(one["step"]),
            str(one.get("reason", "")),
            _figure(one.get("total_s")),
            int(one.get("moved_bytes") or 0),
            int(one.get("redone_steps") or 0),
            _state_from(one),
        ]
        for number, one in enumerate(run.receipts)
    ]
    head = ["", "step", "why", "took, s", "bytes moved", "steps again", "state from"]
    return section("Changes of the layout", table(head, rows), _phases(run))


def _phases(run: Run) -> str:
    shown = run.receipts[:FULL]
    every = [dict(one.get("phases_s") or {}) for one in shown]
    names = list(dict.fromkeys(name for one in every for name in one))
    longest = {n: max(_seconds(one.get(n)) for one in every) for n in names}
    first = sorted(names, key=lambda name: -longest[name])[:DRAWN]
    long = [name for name in names if name in first and longest[name] > 0]
    if not long:
        return ""
    bars = []
    for number, one in enumerate(every):
        parts = [_seconds(one.get(name)) for name in long]
        rest = math.fsum(_seconds(value) for name, value in one.items() if name not in long)
        bars.append(Stack(label=f"{number}: step {shown[number]['step']}", parts=[*parts, rest]))
    words = "What the changes were spent on. `repeat` is the interrupted step, done again."
    return figure(stacks("Phases", "seconds", [*long, "all others"], bars), words)


def layouts(run: Run) -> str:
    """The layouts around each change."""
    receipts = list(enumerate(run.receipts))
    if len(receipts) > FULL:
        receipts = [*receipts[: FULL - 1], receipts[-1]]
    parts = []
    for number, one in receipts:
        before, after = (run.plans.get(int(one[key])) for key in ("from_version", "to_version"))
        inside = [paragraph(str(one.get("reason", "")))]
        for title, plan, other in (("Before", before, before), ("After", after, before)):
            inside.append(f"<h3>{title}</h3>")
            inside.append(cells(plan, other) if plan else paragraph("This plan was not kept."))
        parts.append(section(f"Change {number}, step {one['step']}", *inside))
    return "".join(parts)


def _state_from(one: Entry) -> str:
    rewound = one.get("rewound_to_step")
    source = str(one.get("source") or "")
    return source if rewound is None else f"{source}, step {rewound}"


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _seconds(value: object) -> float:
    found = _figure(value)
    return found if found is not None and math.isfinite(found) and found > 0 else 0.0
