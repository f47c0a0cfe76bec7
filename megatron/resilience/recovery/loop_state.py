"""What Megatron's training loop keeps beside model and optimizer, and a newcomer has to be told.

The iteration itself is a local variable of the loop, so a newcomer's loop starts with it; the rest
is taken over from the members when they meet.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from megatron.resilience.upstream.arguments import current_args
from megatron.resilience.upstream.batch_size import global_batch_size

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
    def ahead(steps: int) -> str:
        """JSON of what a newcomer's loop has to begin with, so many steps later.

        Told before all meet it. The batch size may grow with the samples, and upstream saves
        a checkpoint whenever it sees that: a newcomer must not see it alone.
        """
        now = consumed = int(current_args().consumed_train_samples)
        for _ in range(steps):
            consumed += global_batch_size(consumed)
        global_batch_size(now)
        return json.dumps({"consumed_train_samples": consumed})

    @staticmethod
    def begin(step: int, text: str) -> None:
        """Lets the loop of a newcomer begin where the members will be.

        Args:
            text: What a member has told with :meth:`ahead`.
        """
        args = current_args()
        args.iteration = step
        args.consumed_train_samples = int(json.loads(text)["consumed_train_samples"])
        global_batch_size(args.consumed_train_samples)
