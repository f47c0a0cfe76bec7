"""What has struck, as whoever did it has written down (:mod:`claims`), and what came of it.

Only of a fault on purpose anybody knows when it really happened.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from resihp_ext.errors import UserError
from resihp_ext.faults.fault import LASTING, Fault
from resihp_ext.faults.read import faults_from_yaml


@dataclass(frozen=True, kw_only=True, slots=True)
class Strike:
    """A fault that has struck, at once; slow faults begin, and strike nobody."""

    name: str
    """Its place in the list, or in what was dropped into the job."""
    entry: str
    """In the list."""
    fault: Fault
    rank: int
    """By whom."""
    phase: str
    time_s: float
    """When it did, behind its delay; seconds since the epoch."""


def read_strike(path: Path) -> Strike | None:
    """One file ``NAME.done``; None for a fault that lasts.

    Raises:
        OSError, ValueError, KeyError, TypeError, UserError: who wrote it did not get to the end.
    """
    told = json.loads(path.read_text())
    (fault,) = faults_from_yaml(f"- {told['fault']}", path)
    if fault.kind in LASTING:
        return None
    return Strike(
        name=path.stem,
        entry=told["fault"],
        fault=fault,
        rank=told["rank"],
        phase=told["phase"],
        time_s=float(told["time_s"]) + fault.delay_s,
    )


def fault_behind(
    folder: Path, rank: int, *, after_s: float, seen_s: float
) -> dict[str, Any] | None:
    """The latest fault that struck in ``rank`` before it was found to be lost.

    Args:
        folder: Of the files that say what has struck.
        rank: That was lost.
        after_s: Earlier ones belong to earlier losses; seconds since the epoch, as the next.
        seen_s: When the loss was noticed.

    Returns:
        ``name``, ``fault`` (its entry in the list), ``phase`` and ``time_s`` (when it struck, in
        seconds since the epoch); None if nobody did this on purpose.
    """
    found = [one for path in folder.glob("*.done") if (one := _whole(path)) is not None]
    fitting = [one for one in found if one.rank == rank and after_s < one.time_s <= seen_s]
    last = max(fitting, key=lambda one: one.time_s, default=None)
    if last is None:
        return None
    return {"name": last.name, "fault": last.entry, "phase": last.phase, "time_s": last.time_s}


def _whole(path: Path) -> Strike | None:
    try:
        return read_strike(path)
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None  # who wrote it did not get to the end
