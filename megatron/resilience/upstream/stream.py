"""Micro-batches of a data set as upstream's training and evaluation loops consume them, by number.

Upstream takes it for an "external" data loader and passes it through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.resilience.data.samples import SampleSource


class Stream:
    """Any micro-batch of the current global batch, for any rank."""

    def __init__(self, dataset: Any, micro_batch_size: int, consumed: Callable[[], int]) -> None:
        """Starts behind what was consumed.

        Args:
            consumed: Gives the samples of all earlier batches, when it is first asked.
        """
        self._source = SampleSource(dataset=dataset, micro_batch_size=micro_batch_size)
        self._consumed = consumed
        self._position: int | None = None

    @property
    def position(self) -> int:
        """Samples before the current global batch."""
        if self._position is None:
            self._position = self._consumed()
        return self._position

    def micro_batch(self, number: int) -> dict[str, torch.Tensor]:
        """Fetches micro-batch ``number`` of the current global batch."""
        return self._source.micro_batch(self.position, number)

    def go_to(self, position: int) -> None:
        """Goes back to the global batch behind so many samples."""
        self._position = position

    def advance(self, micro_batches: int) -> None:
        """Goes to the next global batch."""
        self._position = self.position + micro_batches * self._source.micro_batch_size

    def __next__(self) -> Any:
        raise TypeError("micro-batches of a plan are fetched by number")
