"""What the detector says: who is suspected of being slow, and what a validation may find.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

SuspectKind = Literal["device", "link", "host"]


class Verdict(StrEnum):
    """What a validation has found."""

    HEALTHY = "healthy"
    SLOW = "slow"
    UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """Something that is probably slower than it was."""

    kind: SuspectKind
    ranks: tuple[int, ...]
    """One device, the two ends of a link, or all devices of a host."""
    p: float
    """Estimated throughput that is left: 1.0 healthy, 0.5 twice as slow."""
    since_step: int
    evidence: str
    """One plain line for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What the detector makes of one step."""

    step: int
    observed_s: float
    """NaN where the step could not be judged, as :attr:`predicted_s` and :attr:`ratio`."""
    predicted_s: float
    """With the throughputs that are known."""
    ratio: float
    suspects: tuple[Suspect, ...] = ()
    """New ones."""
    recovered: tuple[int, ...] = ()
    """Ranks that were known or reported as slow and are as fast as ever again."""
    unexplained: bool = False
    """The iteration became much slower than predicted, and no device or link explains it."""
