"""A page that stands alone: one HTML file, no scripts, nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root{--ink:#1d2125;--soft:#5b6670;--paper:#fff;--box:#f5f6f7;--rule:#d8dde1;--range:#c9ced3;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#e69f00;--c5:#56b4e9;--c6:#6b5b95;--c7:#7f7f7f;
--healthy:#009e73;--slow:#e69f00;--dead:#c0392b;--standby:#9aa4ad}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#a3adb6;--paper:#15181b;--box:#1f2428;
--rule:#3a4248;--range:#4a535b;--c0:#56a8e0;--c1:#ef8a4a;--c2:#3fc29b;--c3:#e39cc4;--c4:#f0b840;
--c5:#8ccdf2;--c6:#a898d0;--c7:#a8a8a8;--healthy:#3fc29b;--slow:#f0b840;--dead:#e8685a;
--standby:#77828c}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:820px;padding:2rem 1rem 4rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.6rem;line-height:1.25;margin:0 0 .5rem}
h2{font-size:1.2rem;margin:2.2rem 0 .6rem;border-top:1px solid var(--rule);padding-top:1.2rem}
h3{font-size:1rem;margin:1.4rem 0 .4rem}
p{margin:.5rem 0}.soft,figcaption{color:var(--soft)}figcaption{font-size:.9rem}
.badge{display:inline-block;font-size:.75rem;font-weight:600;padding:.1rem .5rem;margin-left:.5rem;
border:1px solid var(--soft);border-radius:1rem;vertical-align:middle}
figure{margin:1rem 0}.wide{overflow-x:auto}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{padding:.25rem .7rem .25rem 0;text-align:left;border-bottom:1px solid var(--rule);
vertical-align:top}
th{font-weight:600}td.n,th.n{text-align:right;white-space:nowrap}
nav a{margin-right:1rem}a{color:var(--c0)}
"""
CHART_STYLE = """
.chart{width:100%;height:auto;display:block}
.chart text{font:11px system-ui,sans-serif;fill:var(--ink)}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}
.mark{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:3 3}
.bad{stroke:var(--dead);stroke-width:1.5}.good{stroke:var(--healthy);stroke-width:1.5}
.interval{stroke:var(--c0);stroke-width:2}.range{stroke:var(--soft);stroke-width:.5}
"""
PRINT_STYLE = "@media print{body{max-width:none;padding:0}figure,table{break-inside:avoid}}"
FILE_STYLE = (STYLE.split("*{box")[0] + CHART_STYLE).replace("\n", "")
"""For a picture that is a file of its own."""

Cell = str | float | int | None


def page(
    title: str, summary: Sequence[str], sections: Sequence[str], *, badges: Sequence[str] = ()
) -> str:
    """The whole page.

    Args:
        summary: Paragraphs of plain text.
        sections: HTML, as :func:`section` gives it.
        badges: Short words behind the title, such as "simulated".
    """
    marks = "".join(f'<span class="badge">{escape(one)}</span>' for one in badges)
    words = "".join(paragraph(one) for one in summary)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}{CHART_STYLE}{PRINT_STYLE}</style></head>"
        f"<body>\n<h1>{escape(title)}{marks}</h1>\n{words}\n"
        + "\n".join(sections)
        + "</body></html>\n"
    )


def section(title: str, *parts: str) -> str:
    """A heading and HTML parts below it."""
    return f"<section><h2>{escape(title)}</h2>{''.join(parts)}</section>"


def paragraph(words: str) -> str:
    """Plain text."""
    return f"<p>{escape(words)}</p>"


def figure(svg: str, caption: str) -> str:
    """A picture with what it shows."""
    return f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>"


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Figures stand right, words left; a column is one of figures when no row has words in it."""
    figures = [
        all(not isinstance(row[at], str) or _is_figure(str(row[at])) for row in rows)
        for at in range(len(head))
    ]
    kinds = [' class="n"' if one else "" for one in figures]
    top = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{kind}>{_cell(cell)}</td>" for kind, cell in zip(kinds, row, strict=True))
        + "</tr>"
        for row in rows
    )
    return (
        f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _cell(cell: Cell) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.4g}"
    return f"{cell:,}" if isinstance(cell, int) else escape(cell)


def _is_figure(words: str) -> bool:
    """As "12.5 %", "1.2x" or "3 to 4"; an empty one is none of the others' business."""
    return not any(letter.isalpha() for letter in words.replace("to", "").replace("x", ""))
