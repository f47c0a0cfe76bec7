"""Lines over an axis, and bars beside the published range."""

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

WIDTH, HEIGHT = 760.0, 320.0
LEFT, RIGHT, TOP, BOTTOM = 64.0, 14.0, 10.0, 40.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """One line."""

    name: str
    points: Sequence[tuple[float, float]]
    """Values that are not finite interrupt the line."""
    dashed: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """Something that happened at a place of the horizontal axis."""

    x: float
    words: str
    kind: str = "mark"
    """CSS class: ``mark``, ``bad``, ``good``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Bars that stand together."""

    label: str
    values: Sequence[float | None]
    """One for each name; None: there is none."""
    ranges: Sequence[tuple[float, float] | None] = ()
    """What was published, one for each value."""


def lines(
    title: str,
    x_label: str,
    y_label: str,
    series: Sequence[Series],
    *,
    marks: Sequence[Mark] = (),
    log_y: bool = False,
    from_zero: bool = False,
    height: float = HEIGHT,
) -> str:
    """Series over one axis.

    Args:
        x_label: With its unit, as ``y_label``.
        log_y: What is not positive is left out.
        from_zero: Whether the vertical axis begins at 0.
    """
    drawn = [_finite(one, log_y) for one in series]
    xs = [x for runs in drawn for run in runs for x, _ in run] + [one.x for one in marks]
    ys = [y for runs in drawn for run in runs for _, y in run]
    names, room = legend([one.name for one in series], LEFT, TOP + 10, WIDTH - LEFT - RIGHT)
    top = TOP + room + 6
    low, high = min(xs, default=0.0), max(xs, default=1.0)
    across = Scale(low, high if high > low else low + 1, LEFT, WIDTH - RIGHT)
    span = (min(ys, default=1.0), max(ys, default=10.0)) if log_y else bounds(ys, zero=from_zero)
    if log_y and span[0] == span[1]:
        span = (span[0] / 2, span[1] * 2)
    up = Scale(*span, height - BOTTOM, top, log=log_y)
    parts = [*names, *_frame(across, up, x_label, y_label, height)]
    for one in marks:
        x = across(one.x)
        parts.append(
            f'<g class="{one.kind}">{line(x, top, x, height - BOTTOM, one.kind)}'
            f"<title>{_said(one.words)}</title></g>"
        )
    for index, runs in enumerate(drawn):
        parts += [_path(run, across, up, index, series[index].dashed) for run in runs]
    return picture(title, WIDTH, height, parts)


def bars(
    title: str,
    y_label: str,
    names: Sequence[str],
    groups: Sequence[Group],
    *,
    published: str = "published",
    height: float = HEIGHT,
) -> str:
    """Groups of bars from 0; behind a bar the range that was published for it."""
    values = [v for one in groups for v in one.values if v is not None and math.isfinite(v)]
    values += [v for one in groups for pair in one.ranges if pair for v in pair]
    shown, room = legend(names, LEFT, TOP + 10, WIDTH - LEFT - RIGHT - 110)
    top = TOP + room + 6
    if any(pair for one in groups for pair in one.ranges):
        shown.append(rect(WIDTH - RIGHT - 100, TOP + 2, 10, 10, "var(--range)", kind="range"))
        shown.append(text(WIDTH - RIGHT - 86, TOP + 11, published))
    up = Scale(*bounds([*values, 0.0], zero=True), height - BOTTOM, top)
    parts = [*shown, *_frame(None, up, "", y_label, height)]
    each = (WIDTH - LEFT - RIGHT) / max(len(groups), 1)
    thick = min(26.0, 0.84 * each / max(len(names), 1))
    for at, group in enumerate(groups):
        middle = LEFT + each * (at + 0.5)
        parts.append(text(middle, height - BOTTOM + 16, _fit(group.label, each), anchor="middle"))
        left = middle - thick * len(names) / 2
        for index, value in enumerate(group.values):
            x = left + thick * index
            pair = group.ranges[index] if index < len(group.ranges) else None
            if pair is not None:
                y = up(max(pair))
                about = f"{names[index]}, {group.label}, {published}: {pair[0]:g} to {pair[1]:g}"
                deep = max(up(min(pair)) - y, 2.0)
                parts.append(rect(x, y, thick, deep, "var(--range)", title=about, kind="range"))
            if value is None or not math.isfinite(value):
                continue
            y, about = up(value), f"{names[index]}, {group.label}: {number(value)}"
            inset = 0.12 * thick
            colour = COLOURS[index % len(COLOURS)]
            parts.append(rect(x + inset, y, thick - 2 * inset, up(0) - y, colour, title=about))
    return picture(title, WIDTH, height, parts)


def _finite(series: Series, log: bool) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in series.points:
        if math.isfinite(x) and math.isfinite(y) and (y > 0 or not log):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(
    run: Sequence[tuple[float, float]], across: Scale, up: Scale, index: int, dashed: bool
) -> str:
    colour = COLOURS[index % len(COLOURS)]
    if len(run) == 1:
        x, y = run[0]
        return f'<circle cx="{across(x)}" cy="{up(y)}" r="2.5" fill="{colour}"/>'
    places = " ".join(f"{across(x)},{up(y)}" for x, y in run)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{places}" class="line" stroke="{colour}"{dash}/>'


def _frame(across: Scale | None, up: Scale, x_label: str, y_label: str, height: float) -> list[str]:
    foot = height - BOTTOM
    parts = []
    for value in up.ticks:
        y = up(value)
        parts.append(line(LEFT, y, WIDTH - RIGHT, y, "grid"))
        parts.append(text(LEFT - 6, y + 4, number(value), anchor="end"))
    for value in across.ticks if across is not None else ():
        assert across is not None
        x = across(value)
        parts.append(line(x, foot, x, foot + 4, "axis"))
        parts.append(text(x, foot + 16, number(value), anchor="middle"))
    parts.append(line(LEFT, foot, WIDTH - RIGHT, foot, "axis"))
    if x_label:
        parts.append(text((LEFT + WIDTH - RIGHT) / 2, height - 6, x_label, anchor="middle"))
    parts.append(text(13, (TOP + foot) / 2, y_label, anchor="middle", turn=True))
    return parts


def _fit(words: str, width: float) -> str:
    most = max(3, int(width / LETTER))
    return words if len(words) <= most else words[: most - 1] + "…"


def _said(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
