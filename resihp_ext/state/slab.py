"""A slab: a hyper-rectangle of a logical tensor; and the common cuts of many of them.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

from resihp_ext.errors import ResiHPError


class StateError(ResiHPError):
    """State that is not where it has to be; names the tensor, the piece and the ranks."""


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Slab:
    """Elements ``low[a] <= i < high[a]`` on every axis ``a`` of a logical tensor."""

    tensor: str
    low: tuple[int, ...]
    high: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.low) != len(self.high) or any(
            not 0 <= low < high for low, high in zip(self.low, self.high, strict=True)
        ):
            raise StateError(f"{self.tensor}: no slab has bounds {self.low} to {self.high}")

    def __str__(self) -> str:
        ranges = ", ".join(f"{a}:{b}" for a, b in zip(self.low, self.high, strict=True))
        return f"{self.tensor}[{ranges}]"

    @classmethod
    def whole(cls, tensor: str, shape: tuple[int, ...]) -> Self:
        """All of a tensor."""
        return cls(tensor=tensor, low=(0,) * len(shape), high=shape)

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(b - a for a, b in zip(self.low, self.high, strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Its extent on every axis."""
        return tuple(b - a for a, b in zip(self.low, self.high, strict=True))

    def intersection(self, other: Slab) -> Self | None:
        """The elements in both; None when there are none."""
        if self.tensor != other.tensor:
            return None
        low = tuple(map(max, self.low, other.low))
        high = tuple(map(min, self.high, other.high))
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None
        return replace(self, low=low, high=high)

    def inside(self, outer: Slab) -> tuple[slice, ...]:
        """Where it lies in an array of the elements of ``outer``."""
        return tuple(
            slice(a - base, b - base)
            for a, b, base in zip(self.low, self.high, outer.low, strict=True)
        )

    def cut(self, axis: int, low: int, high: int) -> Self:
        """The part between two places of one axis, counted from the tensor's first element."""
        return replace(
            self,
            low=(*self.low[:axis], low, *self.low[axis + 1 :]),
            high=(*self.high[:axis], high, *self.high[axis + 1 :]),
        )


Holdings = Mapping[int, Collection[Slab]]
"""What each global rank holds; its slabs may overlap."""


def segments(*holdings: Holdings) -> dict[Slab, tuple[frozenset[int], ...]]:
    """Cuts all slabs at the edges of all others.

    Returns:
        Disjoint slabs that together are everything that somebody holds, in ascending order; for
        each, and for each of ``holdings``, the ranks that hold it. Neighbours with equal ranks are
        joined.
    """
    by_tensor: dict[str, list[tuple[int, int, Slab]]] = {}
    for which, held in enumerate(holdings):
        for rank, slabs in held.items():
            for slab in slabs:
                by_tensor.setdefault(slab.tensor, []).append((which, rank, slab))
    found: dict[Slab, tuple[frozenset[int], ...]] = {}
    for tensor in sorted(by_tensor):
        found.update(_segments_of(tensor, by_tensor[tensor], len(holdings)))
    return found


def _segments_of(
    tensor: str, entries: list[tuple[int, int, Slab]], kinds: int
) -> dict[Slab, tuple[frozenset[int], ...]]:
    axes = len(entries[0][2].low)
    if any(len(slab.low) != axes for _, _, slab in entries):
        raise StateError(f"{tensor}: slabs of different numbers of axes")
    edges = [
        sorted({edge for _, _, slab in entries for edge in (slab.low[axis], slab.high[axis])})
        for axis in range(axes)
    ]
    owners: dict[tuple[int, ...], list[set[int]]] = {}
    for which, rank, slab in entries:
        for place in _cells(slab, edges):
            owners.setdefault(place, [set() for _ in range(kinds)])[which].add(rank)
    cells = {
        Slab(
            tensor=tensor,
            low=tuple(edges[axis][i] for axis, i in enumerate(place)),
            high=tuple(edges[axis][i + 1] for axis, i in enumerate(place)),
        ): tuple(map(frozenset, ranks))
        for place, ranks in owners.items()
    }
    for axis in range(axes):
        cells = _joined(cells, axis)
    return dict(sorted(cells.items()))


def _cells(slab: Slab, edges: list[list[int]]) -> Iterator[tuple[int, ...]]:
    """Places in the grid of all cuts that the slab covers."""
    return product(
        *(
            range(bisect_left(cuts, low), bisect_left(cuts, high))
            for cuts, low, high in zip(edges, slab.low, slab.high, strict=True)
        )
    )


def _joined(
    cells: dict[Slab, tuple[frozenset[int], ...]], axis: int
) -> dict[Slab, tuple[frozenset[int], ...]]:
    """Joins neighbours along one axis that the same ranks hold."""

    def others(slab: Slab) -> tuple[tuple[int, int], ...]:
        spans = tuple(zip(slab.low, slab.high, strict=True))
        return spans[:axis] + spans[axis + 1 :]

    done: list[tuple[Slab, tuple[frozenset[int], ...]]] = []
    for slab in sorted(cells, key=lambda slab: (others(slab), slab.low[axis])):
        last = done[-1] if done else None
        if (
            last is not None
            and last[1] == cells[slab]
            and others(last[0]) == others(slab)
            and last[0].high[axis] == slab.low[axis]
        ):
            done[-1] = (last[0].cut(axis, last[0].low[axis], slab.high[axis]), last[1])
        else:
            done.append((slab, cells[slab]))
    return dict(done)
