"""How fast devices and links are at a moment, or are believed to be.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Self

from resihp_ext.plan.plan import Device

Link = tuple[int, int]
"""Two nodes, the lower first."""


@dataclass(frozen=True, slots=True)
class Health:
    """Throughputs; what is not named is healthy."""

    devices: tuple[tuple[int, float], ...] = ()
    """Global rank and ``p`` of each device that is not healthy, ascending; 0 is dead."""
    links: tuple[tuple[Link, float], ...] = ()
    """Two nodes, and the part of the bandwidth between them that is left, ascending."""

    @classmethod
    def of(cls, p: Mapping[int, float], links: Mapping[Link, float] | None = None) -> Self:
        """From throughputs by rank, and by pair of nodes; healthy ones are left out."""
        return cls(
            devices=tuple(sorted((rank, value) for rank, value in p.items() if value != 1.0)),
            links=tuple(
                sorted((link, value) for link, value in (links or {}).items() if value < 1)
            ),
        )

    @property
    def p(self) -> dict[int, float]:
        """Of devices that are not healthy, by rank."""
        return dict(self.devices)

    @property
    def left(self) -> dict[Link, float]:
        """Of links that are not healthy, by nodes."""
        return dict(self.links)

    @property
    def dead(self) -> frozenset[int]:
        """Ranks that cannot take part."""
        return frozenset(rank for rank, value in self.devices if value <= 0)

    def changed(self, p: Mapping[int, float], links: Mapping[Link, float] | None = None) -> Self:
        """With other throughputs of some devices and links."""
        return self.of({**self.p, **p}, {**self.left, **(links or {})})

    def on(self, devices: Iterable[Device]) -> tuple[Device, ...]:
        """The devices with these throughputs."""
        p = self.p
        return tuple(replace(one, p=p.get(one.rank, 1.0)) for one in devices)
