"""Horizontal pictures: stacked bars, slices on rows of time, means with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from resihp_ext.report.svg import (
    COLOURS,
    LETTER,
    Scale,
    bounds,
    legend,
    line,
    number,
    picture,
    rect,
    text,
)

WIDTH = 760.0
RIGHT, TOP, BOTTOM = 18.0, 10.0, 38.0
THICK = 20.0
LONGEST_LABEL = 30
"""Letters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """A bar made of parts."""

    label: str
    parts: Sequence[float]
    """One for each name, not negative."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """Some time on a row."""

    begin: float
    end: float
    colour: str
    """CSS, as ``var(--c0)``."""
    words: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Slices of one device, rank group or policy."""

    label: str
    slices: Sequence[Slice]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with what is known of it."""

    label: str
    mean: float
    low: float
    high: float


def stacks(title: str, x_label: str, names: Sequence[str], rows: Sequence[Stack]) -> str:
    """Stacked horizontal bars from 0."""
    left = _left([one.label for one in rows])
    shown, room = legend(names, left, TOP + 10, WIDTH - left - RIGHT)
    top = TOP + room + 6
    most = max((math.fsum(one.parts) for one in rows), default=1.0)
    across = Scale(0.0, most or 1.0, left, WIDTH - RIGHT)
    height = top + (THICK + 6) * len(rows) + BOTTOM
    parts = [*shown, *_frame(across, x_label, top, height)]
    for at, one in enumerate(rows):
        y, sum_ = top + (THICK + 6) * at, 0.0
        parts.append(_label(one.label, left, y))
        for index, value in enumerate(one.parts):
            about = f"{one.label}, {names[index]}: {number(value)}"
            x = across(sum_)
            colour = COLOURS[index % len(COLOURS)]
            parts.append(rect(x, y, across(sum_ + value) - x, THICK, colour, title=about))
            sum_ += value
    return picture(title, WIDTH, height, parts)


def gantt(title: str, x_label: str, rows: Sequence[Row], *, thick: float = THICK) -> str:
    """Slices over time."""
    left = _left([one.label for one in rows])
    every = [one for row in rows for one in row.slices]
    low = min((one.begin for one in every), default=0.0)
    high = max((one.end for one in every), default=1.0)
    across = Scale(low, high if high > low else low + 1, left, WIDTH - RIGHT)
    height = TOP + (thick + 4) * len(rows) + BOTTOM
    parts = _frame(across, x_label, TOP, height)
    for at, row in enumerate(rows):
        y = TOP + (thick + 4) * at
        parts.append(_label(row.label, left, y + (thick - THICK) / 2))
        for one in row.slices:
            x = across(one.begin)
            width = max(across(one.end) - x, 0.3)
            parts.append(rect(x, y, width, thick, one.colour, title=one.words))
    return picture(title, WIDTH, height, parts)


def intervals(title: str, x_label: str, rows: Sequence[Interval]) -> str:
    """Means as points, and intervals as lines."""
    left = _left([one.label for one in rows])
    across = Scale(*bounds([v for r in rows for v in (r.low, r.high)]), left, WIDTH - RIGHT)
    height = TOP + (THICK + 6) * len(rows) + BOTTOM
    parts = _frame(across, x_label, TOP, height)
    for at, one in enumerate(rows):
        y = TOP + (THICK + 6) * at
        middle, x = y + THICK / 2, across(one.mean)
        parts.append(_label(one.label, left, y))
        about = f"{one.label}: {number(one.mean)} ({number(one.low)} to {number(one.high)})"
        parts.append(line(across(one.low), middle, across(one.high), middle, "interval"))
        parts.append(rect(x - 4, middle - 4, 8, 8, COLOURS[0], title=about))
    return picture(title, WIDTH, height, parts)


def _left(labels: Sequence[str]) -> float:
    return 14 + LETTER * min(max(map(len, labels), default=0), LONGEST_LABEL)


def _label(words: str, left: float, y: float) -> str:
    short = words if len(words) <= LONGEST_LABEL else words[: LONGEST_LABEL - 1] + "…"
    return text(left - 6, y + THICK / 2 + 4, short, anchor="end")


def _frame(across: Scale, x_label: str, top: float, height: float) -> list[str]:
    foot = height - BOTTOM
    parts = []
    for value in across.ticks:
        x = across(value)
        parts.append(line(x, top, x, foot, "grid"))
        parts.append(text(x, foot + 15, number(value), anchor="middle"))
    parts.append(line(across.begin, foot, across.end, foot, "axis"))
    parts.append(text((across.begin + across.end) / 2, height - 6, x_label, anchor="middle"))
    return parts
