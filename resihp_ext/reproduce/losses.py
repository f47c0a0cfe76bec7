"""Figure 12: the loss with failures coincides with the loss without.

Nothing is simulated here: the curves come from real jobs on this machine's CPU, two runs of the
same steps, one of which loses devices. ``scripts/paper/loss_curves.py`` runs them and writes the
CSV.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import csv
from pathlib import Path

from resihp_ext.errors import UserError
from resihp_ext.reproduce.figure import Claim, Figure, Lines, Part, Results, Scale, Task

COLUMNS = ("step", "with_failures", "without")
BOUND = 1e-5
"""Relative difference up to which curves coincide: what single-precision sums in another order
give."""


def read(path: Path) -> list[tuple[int, float, float]]:
    """Steps and both losses.

    Raises:
        UserError: it cannot be read, or is no such file.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.reader(file))
        if not lines or tuple(lines[0]) != COLUMNS:
            raise ValueError(f"the first line must be {','.join(COLUMNS)}")
        rows = [(int(step), float(one), float(other)) for step, one, other in lines[1:]]
    except (OSError, ValueError) as error:
        raise UserError(
            f"loss curves {path}: {error}; scripts/paper/loss_curves.py writes such a file"
        ) from None
    if not rows:
        raise UserError(f"loss curves {path}: no step in it")
    return rows


def tasks(scale: Scale) -> list[Task]:
    """None: real jobs are run by a script."""
    return []


def make(part: Part, scale: Scale, results: Results) -> Figure:
    """Both curves, and how far they are apart at most."""
    rows = read(scale.losses) if scale.losses is not None else []
    claims, charts = [], []
    if rows:
        apart = max(abs(one - other) / abs(other) for _, one, other in rows)
        claims.append(
            Claim(
                quantity="largest relative difference of the losses of a step",
                values=(apart,),
                paper=(0.0, BOUND),
                better="low",
            )
        )
        series = (
            ("with failures", tuple(one for _, one, _ in rows)),
            ("without", tuple(other for _, _, other in rows)),
        )
        charts.append(
            Lines(
                title="Loss of every step",
                unit="loss",
                across="step",
                x=tuple(float(step) for step, _, _ in rows),
                series=series,
                from_zero=False,
            )
        )
    note = (
        f"Real jobs of {len(rows)} steps on CPUs; the paper says that the curves coincide, and the "
        f"bound of {BOUND:g} is ours."
        if rows
        else "Not drawn: it needs a real job of minutes. Run with --real, or with --losses FILE "
        "after scripts/paper/loss_curves.py."
    )
    return Figure(
        name=part.name,
        title=part.title,
        source=part.source,
        columns=COLUMNS,
        rows=tuple(rows),
        claims=tuple(claims),
        charts=tuple(charts),
        notes=(note,),
    )


LOSSES = Part(
    name="losses",
    title="Loss with and without failures",
    source="Figure 12",
    tasks=tasks,
    make=make,
)
