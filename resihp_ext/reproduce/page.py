"""The report: one page that needs nothing else.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from resihp_ext.reproduce.figure import Bars, Cell, Figure, Lines
from resihp_ext.reproduce.write import CLAIM_COLUMNS, claim_row, said

COLORS = (
    *("#9aa0a6", "#7f6a93", "#c0762f", "#b8a22a", "#5b8c3a", "#2f8f83"),
    *("#3a78b8", "#a34a72", "#8a5a44", "#4d4d9f", "#d1495b"),
)


def picture(chart: Bars | Lines) -> str:
    """An SVG."""
    return _bars(chart) if isinstance(chart, Bars) else ""


def _bars(chart: Bars, width: int = 960, height: int = 260) -> str:
    top = max((v or 0.0) for _, values in chart.series for v in values) or 1.0
    step = (width - 40) / max(len(chart.groups), 1)
    thick = step * 0.85 / max(len(chart.series), 1)
    parts = [f'<text x="4" y="14" font-size="13">{escape(chart.title)}</text>']
    for g, group in enumerate(chart.groups):
        for s, (_, values) in enumerate(chart.series):
            tall = (values[g] or 0.0) / top * (height - 70)
            x, color = 30 + g * step + s * thick, COLORS[s % len(COLORS)]
            parts.append(
                f'<rect x="{x:.1f}" y="{height - 40 - tall:.1f}" width="{thick:.1f}" '
                f'height="{tall:.1f}" fill="{color}"/>'
            )
        parts.append(
            f'<text x="{30 + g * step:.1f}" y="{height - 24}" font-size="11">{escape(group)}</text>'
        )
    for s, (name, _) in enumerate(chart.series):
        x, color = 30 + s * 84, COLORS[s % len(COLORS)]
        parts.append(f'<rect x="{x}" y="{height - 14}" width="9" height="9" fill="{color}"/>')
        parts.append(f'<text x="{x + 12}" y="{height - 5}" font-size="11">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif">{"".join(parts)}</svg>\n'
    )


def pictures(figures: Sequence[Figure]) -> dict[str, str]:
    """By name of the file."""
    return {
        f"{one.name}-{number}.svg": picture(chart)
        for one in figures
        for number, chart in enumerate(one.charts, 1)
    }


def page(figures: Sequence[Figure]) -> str:
    """HTML."""
    claims = [claim_row(figure, claim) for figure in figures for claim in figure.claims]
    body = ["<h1>The paper's tables and figures</h1>", _table(CLAIM_COLUMNS, claims)]
    for one in figures:
        body.append(f"<h2>{escape(one.title)} ({escape(one.source)})</h2>")
        body += [f"<p>{escape(note)}</p>" for note in one.notes]
        body += [picture(chart) for chart in one.charts]
        body.append(f"<details><summary>Table</summary>{_table(one.columns, one.rows)}</details>")
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><title>resihp reproduce</title>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ("".join(f"<td>{escape(said(cell))}</td>" for cell in row) for row in rows)
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
