"""How careful a job is with the checkpoint it starts from."""

import math
from dataclasses import dataclass
from typing import Literal

from resihp_ext.errors import UserError

LEVELS = ("full", "size", "off")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSafetyConfig:
    """Checkpoint safety.

    Checks of a checkpoint before it is loaded; each field is a ``--resilience-`` flag.
    """

    verify_checkpoint: Literal["full", "size", "off"] = "full"
    """How to check a checkpoint before loading it. full: compare all content with the checksums
    stored in it, divided over the ranks. size: only look for missing, truncated or torn files.
    off: only skip saves that were never finished."""

    verify_checkpoint_timeout_s: float = 600.0
    """Longest wait, in seconds, for another rank to finish its part of the check after this
    rank has finished its own; ranks that do not answer in time are named and the job stops."""

    def __post_init__(self) -> None:
        if self.verify_checkpoint not in LEVELS:
            raise UserError(
                f"--resilience-verify-checkpoint is {self.verify_checkpoint!r}; "
                f"choose one of {', '.join(LEVELS)}"
            )
        timeout_s = self.verify_checkpoint_timeout_s
        if not (math.isfinite(timeout_s) and timeout_s > 0):
            raise UserError(
                f"--resilience-verify-checkpoint-timeout-s is {timeout_s}; "
                "give a positive number of seconds"
            )
