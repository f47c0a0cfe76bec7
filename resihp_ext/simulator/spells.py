"""Faults with a beginning and an end, and what they make of devices and links together.

Faults overlap. A device that some fault has killed is dead until the last such fault has ended; of
several that make it slow the parts of its speed multiply, as in :mod:`resihp_ext.faults.lasting`.
So a repair ends its own fault and no other.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod

from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.health import Link

ROUNDED = 6
"""Decimals of a product of throughputs: the same bytes in whatever order faults have begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spell:
    """One fault."""

    begin_s: float
    end_s: float = inf
    """When it is repaired; endless: never."""
    ranks: tuple[int, ...] = ()
    links: tuple[Link, ...] = ()
    left: float = 0.0
    """Throughput, or part of the bandwidth, that is left: 0 is dead."""

    def __post_init__(self) -> None:
        if not self.begin_s >= 0 or not self.end_s > self.begin_s:
            raise ValueError(f"fault from {self.begin_s} s to {self.end_s} s: ends too early")
        if not 0 <= self.left < 1 or (self.links and not self.left):
            raise ValueError(f"fault that leaves {self.left}: from 0, of links above 0, below 1")


def happenings_of(spells: Iterable[Spell], until_s: float = inf) -> tuple[Happening, ...]:
    """What is true from when on, in the order of time; moments that change nothing are left out.

    Args:
        until_s: What comes then or later is left out.
    """
    ordered = sorted(spells, key=lambda one: (one.begin_s, one.end_s, one.ranks, one.links))
    devices = _changes(ordered, lambda one: one.ranks)
    links = _changes(ordered, lambda one: one.links)
    moments = sorted(at_s for at_s in devices.keys() | links.keys() if at_s < until_s)
    return tuple(
        Happening(
            at_s=at_s,
            p=tuple(sorted(devices.get(at_s, {}).items())),
            links=tuple(sorted(links.get(at_s, {}).items())),
        )
        for at_s in moments
    )


def _changes[Key: Hashable](
    spells: Iterable[Spell], keys_of: Callable[[Spell], Iterable[Key]]
) -> dict[float, dict[Key, float]]:
    """For every moment at which something changes, what is left from then on."""
    mine: dict[Key, list[Spell]] = {}
    for one in spells:
        for key in keys_of(one):
            mine.setdefault(key, []).append(one)
    found: dict[float, dict[Key, float]] = {}
    for key, faults in mine.items():
        for at_s, left in _course(faults).items():
            found.setdefault(at_s, {})[key] = left
    return found


def _course(faults: list[Spell]) -> Mapping[float, float]:
    """What is left of one device or link, from each moment on at which that changes."""
    moments = sorted({at for one in faults for at in (one.begin_s, one.end_s) if at < inf})
    found, before = {}, 1.0
    for at_s in moments:
        acting = [one.left for one in faults if one.begin_s <= at_s < one.end_s]
        # Alive is alive, however slow.
        left = max(round(prod(acting), ROUNDED), 10.0**-ROUNDED) if all(acting) else 0.0
        if left != before:
            found[at_s] = before = left
    return found
