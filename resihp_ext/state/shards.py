"""Which owner of a sync domain keeps which part of its optimizer state (ZeRO-1 on sync domains).

The owners of a domain hold the same elements, so each can keep the state of a share of them
(Rajbhandari et al. 2020, stage 1). Shares are cut through a domain's slabs in their order, along
the first axis on which a slab has more than one element: they stay slabs, and differ in size by at
most a row.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.state.domains import SyncDomain
from resihp_ext.state.slab import Slab


def shares(domain: SyncDomain) -> dict[int, tuple[Slab, ...]]:
    """Cuts a domain into one share an owner, in the order of its slabs; some may be empty."""
    owners = domain.owners
    ends = [domain.elements * (k + 1) // len(owners) for k in range(len(owners))]
    found: dict[int, list[Slab]] = {owner: [] for owner in owners}
    at = k = 0
    for slab in domain.slabs:
        rest: Slab | None = slab
        while rest is not None:
            # The last owner takes whatever rounding leaves.
            room = ends[k] - at if k < len(owners) - 1 else rest.elements
            head, rest = _split(rest, room)
            if head is not None:
                found[owners[k]].append(head)
                at += head.elements
            if rest is not None:
                k += 1
    return {owner: tuple(slabs) for owner, slabs in found.items()}


def _split(slab: Slab, room: int) -> tuple[Slab | None, Slab | None]:
    """Cuts off as many rows as come closest to ``room`` elements."""
    if slab.elements <= room:
        return slab, None
    if not slab.low:
        return None, slab
    axis = next(
        (a for a, (x, y) in enumerate(zip(slab.low, slab.high, strict=True)) if y - x > 1), 0
    )
    low, high = slab.low[axis], slab.high[axis]
    row = slab.elements // (high - low)
    rows = (max(room, 0) + row // 2) // row
    if rows == 0:
        return None, slab
    if rows >= high - low:
        return slab, None
    return slab.cut(axis, low, low + rows), slab.cut(axis, low + rows, high)
