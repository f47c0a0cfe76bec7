"""Keeps torch's random state across the building of data loaders.

Upstream restores the random state of a checkpoint first and builds the data loaders afterwards;
every loader then draws a seed from torch's CPU generator. On a GPU dropout uses another generator
and nobody notices. On a CPU it is the same one, and a resumed job would draw other dropout masks
than the job that never stopped.
"""

from __future__ import annotations

import torch


class RngKeeper:
    """Remembers the state before the data sets are built and restores it once, before training."""

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None
        self._restored = False

    def remember(self) -> None:
        """Takes the state; later calls (one per virtual stage) keep the first."""
        if self._state is None:
            self._state = torch.get_rng_state()

    def restore(self) -> None:
        """Puts the state back, the first time it is called."""
        if not self._restored and self._state is not None:
            torch.set_rng_state(self._state)
        self._restored = True
