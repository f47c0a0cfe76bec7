"""What a change of layout takes, from the receipts of a real job.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from resihp_ext.cost.cost_model import CostModel
from resihp_ext.errors import UserError

MOVING = ("move",)
"""Phases that grow with the bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Of changes."""

    fixed_s: float
    """The median of all of them, moving left out: agreeing, groups, modules, checks."""
    bytes_per_s: float | None
    """All bytes over all seconds of moving; None: nothing has moved."""

    def applied(self, cost: CostModel) -> CostModel:
        """The prices with this fixed part."""
        return replace(cost, fixed_transition_s=self.fixed_s)

    def seconds(self, moved_bytes: int) -> float:
        """Of a change that moves so much in all."""
        return self.fixed_s + (moved_bytes / self.bytes_per_s if self.bytes_per_s else 0.0)


def calibrated(receipts: Iterable[Mapping[str, Any]]) -> Calibration:
    """From the receipts of one job.

    Raises:
        UserError: there are none.
    """
    fixed, moved_bytes, moving_s = [], 0, 0.0
    for one in receipts:
        phases = one["phases_s"]
        mine_s = sum(float(phases.get(name, 0.0)) for name in MOVING)
        fixed.append(float(one["total_s"]) - mine_s)
        moved_bytes += int(one["moved_bytes"])
        moving_s += mine_s
    if not fixed:
        raise UserError("calibration: no receipts; give a job whose layout has changed")
    speed = moved_bytes / moving_s if moving_s > 0 and moved_bytes else None
    return Calibration(fixed_s=median(fixed), bytes_per_s=speed)
