"""Which fault on purpose a loss came of: only then anybody knows when it really happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from resihp_ext.errors import UserError
from resihp_ext.faults.read import faults_from_yaml


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
    found = [one for path in folder.glob("*.done") if (one := _read(path, rank)) is not None]
    fitting = [one for one in found if after_s < one["time_s"] <= seen_s]
    return max(fitting, key=lambda one: one["time_s"], default=None)


def _read(path: Path, rank: int) -> dict[str, Any] | None:
    try:
        told = json.loads(path.read_text())
        if told["rank"] != rank:
            return None
        (fault,) = faults_from_yaml(f"- {told['fault']}", path)
        struck_s = float(told["time_s"]) + fault.delay_s
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None  # who wrote it did not get to the end
    return {
        "name": path.stem,
        "fault": told["fault"],
        "phase": told["phase"],
        "time_s": struck_s,
    }
