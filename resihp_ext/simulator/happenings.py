"""What befalls devices and links: throughputs that change at a moment.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.simulator.health import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Happening:
    """From a moment on, some devices and links have another true throughput."""

    at_s: float
    p: tuple[tuple[int, float], ...] = ()
    """Global rank and throughput: 0 is dead, 1 healthy again."""
    links: tuple[tuple[Link, float], ...] = ()
    """Two nodes, and the part of the bandwidth between them that is left; 1 is healthy again."""
