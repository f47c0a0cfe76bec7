"""Which rank sends which slab to whom, so that everyone gets what it needs and lacks.

Promise: every element that a rank needs and does not hold arrives exactly once; nothing else moves;
the work is spread over those who hold it. The same input gives the same list on every rank.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    return spread(
        Lack(slab=slab, owners=owners, ranks=users - owners)
        for slab, (owners, users) in segments(held, needed).items()
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Lack:
    """A piece that some ranks need and do not have."""

    slab: Slab
    owners: frozenset[int]
    """Who has it."""
    ranks: frozenset[int]


def spread(lacks: Iterable[Lack]) -> tuple[Transfer, ...]:
    """Chooses a sender for every piece that a rank lacks, as :func:`plan_transfers` says.

    Raises:
        StateError: a piece that somebody needs and nobody holds.
    """
    wanted = []
    load: dict[int, int] = {}
    for one in lacks:
        if one.ranks and not one.owners:
            raise StateError(f"{one.slab} is needed by ranks {sorted(one.ranks)} and held by none")
        wanted += [(one.slab, one.owners, rank) for rank in sorted(one.ranks)]
        load |= dict.fromkeys(one.owners, 0)
    wanted.sort(key=lambda item: (-item[0].elements, item[0], item[2]))
    transfers = []
    for slab, owners, destination in wanted:
        source = min(owners, key=lambda rank: (load[rank], rank))
        load[source] += slab.elements
        transfers.append(Transfer(source=source, destination=destination, slab=slab))
    return tuple(sorted(transfers))
