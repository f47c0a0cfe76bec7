"""Messages of micro-benchmarks between members, beside those of training.

They go through the job's own connections, between two steps, when no message of training is under
way between the ranks that take part. Where the backend has tags (gloo) they have one of their own;
NCCL matches by order, which is that of the probe's tasks on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

_TAG = 1 << 29
"""Above all tags of training and of emulation."""


class Exchange:
    """Sends and receives of one rank; a partner's death ends them as it ends those of training."""

    def __init__(self, device: torch.device, number: Callable[[int], int]) -> None:
        """Prepares it.

        Args:
            device: Where tensors live that the backend moves.
            number: What torch calls a global rank.
        """
        self.device, self._number = device, number

    def run(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
    ) -> None:
        """Moves tensors to and from global ranks, all at once; waits until that is done.

        Waits end when a connection is broken off, which is what happens when a member is lost.
        """
        operations = [
            dist.P2POp(how, tensor, self._number(rank), tag=_TAG)
            for how, moves in ((dist.isend, sends), (dist.irecv, receives))
            for tensor, rank in moves
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def tensor(self, size_bytes: int) -> torch.Tensor:
        """Something to send or to receive into."""
        return torch.zeros(size_bytes, dtype=torch.uint8, device=self.device)
