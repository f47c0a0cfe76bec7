"""Settings of the executor."""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.errors import UserError
from resihp_ext.state.keepers import Redundancy


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutorConfig:
    """Layout."""

    plan_schedule: str | None = None
    """YAML file of layouts and the steps from which they are used; the job changes between them
    while it runs."""

    optimizer_redundancy: Redundancy | None = None
    """Who keeps the optimizer's state of a weight: replicated: every rank that owns the weight
    (default); buddy: one of them, and a second copy on another node (default with
    --use-distributed-optimizer); checkpoint: one of them, checkpoints are the second copy."""

    migrate_delta_micro_batches: int = 0
    """How many micro-batches a replica's instance of a stage may be behind the fastest before one
    of its pending micro-batches moves there, within the step; 0: none ever does. Only on CPUs."""

    def __post_init__(self) -> None:
        if self.migrate_delta_micro_batches < 0:
            raise UserError(
                "--resilience-migrate-delta-micro-batches "
                f"{self.migrate_delta_micro_batches}: a number of micro-batches, or 0"
            )
