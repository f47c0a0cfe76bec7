"""Settings of timing."""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class TimingConfig:
    """Timing."""

    timings_every: int = 0
    """Steps between two for which every rank writes into events.jsonl how long each of its actions
    took, and how much of that it waited; 0: none."""

    def __post_init__(self) -> None:
        if self.timings_every < 0:
            raise UserError(
                f"--resilience-timings-every is {self.timings_every}; give 0 or a number of steps"
            )
