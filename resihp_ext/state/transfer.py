"""Which rank sends which slab to whom, so that everyone gets what it needs and lacks.

Promise: every element that a rank needs and does not hold arrives exactly once; nothing else moves;
the work is spread over those who hold it. The same input gives the same list on every rank.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.state.slab import Holdings, Slab, StateError, segments


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Transfer:
    """One piece on its way."""

    source: int
    destination: int
    slab: Slab


def plan_transfers(held: Holdings, needed: Holdings) -> tuple[Transfer, ...]:
    """Plans the moves from what ranks hold to what they need.

    Large pieces are given out first, each to the source with the least to send so far (longest
    processing time first, Graham 1969).

    Args:
        held: What each live rank holds now.
        needed: What each rank must hold afterwards.

    Returns:
        The transfers in ascending order.

    Raises:
        StateError: a piece that somebody needs and nobody holds.
    """
    wanted: list[tuple[Slab, frozenset[int], int]] = []
    for slab, (owners, users) in segments(held, needed).items():
        lacking = users - owners
        if lacking and not owners:
            raise StateError(f"{slab} is needed by ranks {sorted(users)} and held by none")
        wanted += [(slab, owners, rank) for rank in sorted(lacking)]
    wanted.sort(key=lambda item: (-item[0].elements, item[0], item[2]))
    load: dict[int, int] = dict.fromkeys(held, 0)
    transfers = []
    for slab, owners, destination in wanted:
        source = min(owners, key=lambda rank: (load[rank], rank))
        load[source] += slab.elements
        transfers.append(Transfer(source=source, destination=destination, slab=slab))
    return tuple(sorted(transfers))
