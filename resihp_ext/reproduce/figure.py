"""What a table or figure is made of: work to do, rows that come of it, claims of the paper.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

Cell = str | int | float | None


@runtime_checkable
class Task(Hashable, Protocol):
    """A piece of work that a process does on its own; equal tasks give equal results."""

    def run(self) -> Any:
        """Does it."""


Results = Mapping[Task, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """How much is run."""

    seeds: int = 2
    """Draws of faults of each case."""
    small: bool = False
    """Two small configurations, short series: a check that all of it works, no reproduction."""
    losses: Path | None = None
    """CSV of loss curves, as ``scripts/paper/loss_curves.py`` writes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A figure of the paper beside ours."""

    quantity: str
    values: tuple[float, ...]
    """Ours, one of each configuration or case that the paper's range is over."""
    paper: tuple[float, float]
    """From and to; an open end is infinite, or zero."""
    unit: str = ""
    better: str | None = None
    """``low`` or ``high``, where being further out on this side is no difference to explain."""
    why: str = ""
    """Where ours is outside: what it hangs on."""

    @property
    def ours(self) -> tuple[float, float]:
        """From and to."""
        return (min(self.values), max(self.values)) if self.values else (inf, -inf)

    @property
    def within(self) -> bool:
        """Whether all of ours is in the paper's range."""
        low, high = self.ours
        return bool(self.values) and self.paper[0] <= low and high <= self.paper[1]

    @property
    def touches(self) -> bool:
        """Whether some of ours is."""
        low, high = self.ours
        return self.paper[0] <= high and low <= self.paper[1]

    @property
    def verdict(self) -> str:
        """In a word."""
        if not self.values:
            return "not run"
        if self.within:
            return "inside"
        if self.touches:
            return "overlaps"
        return "above" if self.ours[0] > self.paper[1] else "below"

    @property
    def ratio(self) -> float | None:
        """Our middle over the paper's; geometric. None where one has no middle."""
        ours, paper = middle(*self.ours), middle(*self.paper)
        return ours / paper if ours is not None and paper is not None else None


def middle(low: float, high: float) -> float | None:
    """The geometric mean of both ends; the other end where one is open; None for no range."""
    if low > high:
        return None
    if low <= 0 or not isfinite(low):
        return high if isfinite(high) and high > 0 else None
    return sqrt(low * high) if isfinite(high) else low


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """A chart: groups of bars side by side."""

    title: str
    unit: str
    groups: tuple[str, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    """Name, and a value for each group; None is not drawn."""
    ranges: tuple[tuple[tuple[float, float] | None, ...], ...] = ()
    """The paper's, for each series and group; none at all: nothing is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lines:
    """A chart: values over something that grows."""

    title: str
    unit: str
    across: str
    """What the values lie over."""
    x: tuple[float, ...]
    series: tuple[tuple[str, tuple[float | None, ...]], ...]
    from_zero: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A finished table or figure."""

    name: str
    title: str
    source: str
    """In the paper."""
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    claims: tuple[Claim, ...] = ()
    charts: tuple[Bars | Lines, ...] = ()
    notes: tuple[str, ...] = ()
    """How it was made, and what it hangs on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A table or figure that can be asked for."""

    name: str
    title: str
    source: str
    tasks: Callable[[Scale], Sequence[Task]]
    make: Callable[[Part, Scale, Results], Figure]
