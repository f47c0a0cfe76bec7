"""Settings of the recovery."""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryConfig:
    """Recovery."""

    memory_copy_steps: int = 10
    """Steps between two copies of the state in host memory, each on two ranks, on different nodes
    if there are several; 0: none, and what all its owners lose comes from a checkpoint."""

    def __post_init__(self) -> None:
        if self.memory_copy_steps < 0:
            flag = "--resilience-memory-copy-steps"
            raise UserError(f"{flag} {self.memory_copy_steps}: give 0 or more")
