"""Scales, ticks and text of charts: what every picture is made of. Same input, same bytes.

Colours are CSS variables of :mod:`resihp_ext.report.page`, so that a page decides about light and
dark; the values behind them can be told apart by the colour-blind (Okabe and Ito 2008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = tuple(f"var(--c{i})" for i in range(8))
LETTER = 6.4
"""About the width of a letter of 11 pixels, in pixels."""


@dataclass(frozen=True, slots=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    begin: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value; values outside lie on the edge."""
        low, high = self._of(self.low), self._of(self.high)
        part = 0.0 if high == low else (self._of(value) - low) / (high - low)
        return round(self.begin + (self.end - self.begin) * min(max(part, 0.0), 1.0), 2)

    def _of(self, value: float) -> float:
        return math.log10(max(value, 1e-300)) if self.log else value

    @property
    def ticks(self) -> list[float]:
        """Round values inside."""
        return log_ticks(self.low, self.high) if self.log else ticks(self.low, self.high)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten, about ``count`` of them."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten; between few of them 2 and 5 times as well."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    factors = (1, 2, 5) if last - first <= 2 else (1,)
    found = [f * 10.0**e for e in range(first, last + 1) for f in factors]
    return [value for value in found if low * 0.999 <= value <= high * 1.001] or [low, high]


def bounds(values: Sequence[float], *, zero: bool = False) -> tuple[float, float]:
    """What an axis spans: all finite values, and some room."""
    good = [value for value in values if math.isfinite(value)]
    if not good:
        return 0.0, 1.0
    low, high = min(good), max(good)
    if zero:
        low, high = min(low, 0.0), max(high, 0.0)
    room = 0.05 * (high - low) or abs(high) * 0.1 or 1.0
    return (low if zero and low == 0 else low - room), (high if zero and high == 0 else high + room)


def number(value: float) -> str:
    """A figure as people read it on an axis."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        return f"{value:.0e}".replace("e+0", "e").replace("e-0", "e-").replace("e+", "e")
    return f"{value:,.0f}" if size >= 1000 else f"{value:.4g}"


def text(
    x: float, y: float, words: str, *, anchor: str = "start", kind: str = "", turn: bool = False
) -> str:
    """Some words."""
    turned = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    name = f' class="{kind}"' if kind else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{name}{turned}>{escape(words)}</text>'
    )


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def rect(
    x: float, y: float, width: float, height: float, fill: str, *, title: str = "", kind: str = ""
) -> str:
    """A box; the title is shown when somebody points at it."""
    name = f' class="{kind}"' if kind else ""
    inside = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0):.2f}" height="{max(height, 0):.2f}"'
        f' fill="{fill}"{name}>{inside}</rect>'
    )


def picture(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """The whole SVG."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'role="img" class="chart" style="max-width:{width:.0f}px">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def legend(names: Sequence[str], x: float, y: float, width: float) -> tuple[list[str], float]:
    """Names beside their colours, in as many rows as needed; returns the height, too."""
    parts, at, row = [], x, 0
    for index, name in enumerate(names):
        needs = 22 + LETTER * len(name)
        if at > x and at + needs > x + width:
            at, row = x, row + 1
        top = y + 16 * row
        parts.append(rect(at, top - 8, 10, 10, COLOURS[index % len(COLOURS)]))
        parts.append(text(at + 14, top + 1, name))
        at += needs
    return parts, 16.0 * (row + 1) if names else 0.0


def alone(svg: str, style: str) -> str:
    """A picture as a file of its own, with the style that a page would give it."""
    return svg.replace("<title>", f"<style>{style}</style><title>", 1)
