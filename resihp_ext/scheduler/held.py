"""What each rank holds under a plan.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.plan.plan import Plan, Stage


@dataclass(frozen=True, slots=True)
class Held:
    """What a rank holds."""

    stage: Stage
    tp_rank: int

    @property
    def part(self) -> tuple[float, float]:
        """Of every matrix, from and to."""
        tp = self.stage.tp
        return self.tp_rank / tp, (self.tp_rank + 1) / tp


def holdings(plan: Plan) -> dict[int, Held]:
    """What every rank of a plan holds."""
    return {
        rank: Held(stage, tp_rank)
        for one in plan.replicas
        for stage in one.stages
        for tp_rank, rank in enumerate(stage.ranks)
    }
