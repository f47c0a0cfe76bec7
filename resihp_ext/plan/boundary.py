"""How the activations between two stages are cut, sent once, and put together again.

Activations at a boundary are the same on all ranks of a tensor-parallel group, or cut by rows under
sequence parallelism. Each rank of either stage answers for an equal share of the rows; cutting at
the edges of both gives pieces with one sender and one receiver each. Where one degree divides the
other these are ``max(senders, receivers)`` equal chunks (ResiHP's executor); where not, no least
common multiple is needed. One copy crosses the boundary; the receivers' group rebuilds the rest by
an all-gather inside itself.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows ``low`` to ``high``, from a tensor-parallel rank of one stage to one of the other."""

    sender: int
    receiver: int
    low: int
    high: int


def share(rows: int, degree: int, tp_rank: int) -> tuple[int, int]:
    """The rows that a tensor-parallel rank answers for: its shard under sequence parallelism."""
    return rows * tp_rank // degree, rows * (tp_rank + 1) // degree


@lru_cache(maxsize=256)
def pieces(rows: int, senders: int, receivers: int) -> tuple[Piece, ...]:
    """Cuts ``rows`` between two tensor-parallel degrees; pieces in ascending order."""
    found = []
    sender = receiver = low = 0
    while low < rows:
        ends = share(rows, senders, sender)[1], share(rows, receivers, receiver)[1]
        high = min(ends)
        if high > low:
            found.append(Piece(sender, receiver, low, high))
        low = high
        sender += ends[0] == high
        receiver += ends[1] == high
    return tuple(found)
