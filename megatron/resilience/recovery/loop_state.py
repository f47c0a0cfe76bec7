"""What Megatron's training loop keeps beside model and optimizer, and a newcomer has to be told.

The iteration itself is a local variable of the loop, so a newcomer's loop starts with it; the rest
is taken over from the members when they meet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron.resilience.upstream.arguments import current_args

_COUNTERS = (
    "consumed_train_samples",
    "skipped_train_samples",
    "consumed_valid_samples",
    "num_floating_point_operations_so_far",
)


@dataclass(slots=True)
class LoopState:
    """Handles of this rank's training loop."""

    scheduler: Any
    """Megatron's ``OptimizerParamScheduler``."""

    def told(self, *, done: int) -> str:
        """JSON of everything.

        Args:
            done: Stretches of work that are finished.
        """
        args = current_args()
        return json.dumps(
            {
                "done": done,
                "scheduler_steps": self.scheduler.num_steps,
                "counters": {name: getattr(args, name, 0) for name in _COUNTERS},
            }
        )

    def take(self, text: str) -> int:
        """Takes over what a member has told.

        Returns:
            Stretches of work that are finished.
        """
        found, args = json.loads(text), current_args()
        for name, value in found["counters"].items():
            setattr(args, name, value)
        self.scheduler.num_steps = 0
        self.scheduler.step(increment=found["scheduler_steps"])
        return int(found["done"])

    @staticmethod
    def floating_point_operations() -> float:
        """Counted so far, by the arguments."""
        return float(getattr(current_args(), "num_floating_point_operations_so_far", 0.0))
