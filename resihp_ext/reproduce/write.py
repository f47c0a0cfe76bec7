"""Figures as files: a CSV each, pictures, and one page.

The same figures give the same bytes. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from math import isfinite
from pathlib import Path

from resihp_ext.reproduce.figure import Cell, Claim, Figure

CLAIM_COLUMNS = (
    *("figure", "quantity", "unit", "ours_low", "ours_high", "paper_low", "paper_high"),
    *("ratio", "verdict", "why"),
)


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """As spreadsheets read it; numbers to six digits."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([said(cell, 6) for cell in row] for row in rows)
    return out.getvalue()


def said(cell: Cell, digits: int = 3) -> str:
    """A cell as text."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.{digits}g}" if isfinite(cell) else ""
    return str(cell)


def claim_row(figure: Figure, claim: Claim) -> tuple[Cell, ...]:
    """In :data:`CLAIM_COLUMNS`."""
    head = (figure.name, claim.quantity, claim.unit)
    return (*head, *claim.ours, *claim.paper, claim.ratio, claim.verdict, claim.why)


def write_all(figures: Sequence[Figure], out: Path, page: str, pictures: dict[str, str]) -> None:
    """Writes everything into a folder, which is made."""
    out.mkdir(parents=True, exist_ok=True)
    claims = [claim_row(figure, claim) for figure in figures for claim in figure.claims]
    files = {f"{one.name}.csv": csv_text(one.columns, one.rows) for one in figures}
    files["claims.csv"] = csv_text(CLAIM_COLUMNS, claims)
    files |= pictures | {"report.html": page}
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
