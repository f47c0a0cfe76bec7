"""Samples by address: any rank can fetch any micro-batch of any step.

Megatron's sampler walks over the data set in order: step after step, and inside a step micro-batch
after micro-batch, each data-parallel rank taking its share. So the samples of a micro-batch follow
from how many samples were consumed before the step and from the micro-batch's number in the global
batch; the layout only decides which rank computes it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, default_collate


def micro_batch_number(replica: int, turn: int, replicas: int) -> int:
    """Number, in the global batch, of the ``turn``-th micro-batch that ``replica`` computes.

    This is the order of Megatron's own sampler in a uniform layout.
    """
    return turn * replicas + replica


def sample_numbers(consumed_samples: int, micro_batch: int, micro_batch_size: int) -> range:
    """Global sample numbers of one micro-batch.

    Args:
        consumed_samples: Samples of all earlier steps; ``step * global_batch_size`` when the
            batch size is constant.
        micro_batch: Number of the micro-batch in the global batch of the step, from 0.
    """
    first = consumed_samples + micro_batch * micro_batch_size
    return range(first, first + micro_batch_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSource:
    """Micro-batches of one data set, by address; no state, no order, no collective."""

    dataset: Dataset[Any]
    micro_batch_size: int

    def micro_batch(self, consumed_samples: int, micro_batch: int) -> dict[str, torch.Tensor]:
        """Fetches one micro-batch; every tensor has ``micro_batch_size`` rows.

        Raises:
            IndexError: past the end of the data set.
        """
        numbers = sample_numbers(consumed_samples, micro_batch, self.micro_batch_size)
        batch: dict[str, torch.Tensor] = default_collate([self.dataset[k] for k in numbers])
        return batch
