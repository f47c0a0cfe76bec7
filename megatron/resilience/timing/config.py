"""Settings of timing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from resihp_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingConfig:
    """Timing."""

    timings_steps: int = 0
    """Steps between two for which every rank writes into events.jsonl how long each of its actions
    took, and how much of that it waited; 0: none."""

    detect: Literal["off", "observe", "act"] = "off"
    """off: nobody looks for slow devices. observe: looks for slow devices, links and nodes by the
    times of every step, and says so in the launcher's output; changes nothing. act: also changes
    the layout when devices have become slow, or as fast as before, and that is worth it. Both need
    a core for every rank, or emulated devices: ranks that share cores slow each other down."""

    recheck_steps: int = 100
    """Steps between two short measurements of devices and links that were measured as slow, or that
    could not be measured, with --resilience-detect; 0: none."""

    def __post_init__(self) -> None:
        if self.timings_steps < 0:
            raise UserError(
                f"--resilience-timings-steps is {self.timings_steps}; give 0 or a number of steps"
            )
        if self.recheck_steps < 0:
            raise UserError(
                f"--resilience-recheck-steps is {self.recheck_steps}; give 0 or a number of steps"
            )
