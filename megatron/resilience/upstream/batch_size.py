"""Megatron's global batch size, which may grow with the samples that are consumed."""

from __future__ import annotations

from megatron.core.num_microbatches_calculator import (
    StepBatchsizeNumMicroBatchesCalculator,
    get_current_global_batch_size,
    update_num_microbatches,
)

from resihp_ext.errors import UserError


def global_batch_size(consumed_samples: int) -> int:
    """Samples of the step that follows so many; from here on Megatron's loop counts with it."""
    update_num_microbatches(consumed_samples, consistency_check=False)
    return int(get_current_global_batch_size())


def sizes_of(schedule: str) -> list[int]:
    """Global batch sizes of a ``--step-batch-size-schedule``, in their order.

    Raises:
        UserError: it is none.
    """
    try:
        steps = StepBatchsizeNumMicroBatchesCalculator._parse_schedule(schedule, None)
    except ValueError as error:
        raise UserError(f"--step-batch-size-schedule {schedule}: {error}") from error
    return [size for _, size in steps]
