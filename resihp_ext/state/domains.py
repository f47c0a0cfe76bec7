"""Sync domains: pieces of logical tensors that the same ranks own, reduced together.

Different tensor-parallel degrees, different layer maps, dead replicas and tied embeddings are all
the same case here: an element has a set of owners, wherever and for whatever reason they hold it.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from resihp_ext.state.slab import Holdings, Slab, StateError, segments


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class SyncDomain:
    """One flat buffer, one collective."""

    owners: tuple[int, ...]
    """Global ranks, ascending."""
    slabs: tuple[Slab, ...]
    """What is in the buffer, in this order."""

    @property
    def elements(self) -> int:
        """Length of the buffer."""
        return sum(slab.elements for slab in self.slabs)


def sync_domains(holdings: Holdings) -> tuple[SyncDomain, ...]:
    """Groups everything that is held by its owners.

    Returns:
        Domains in one global order. All ranks visit theirs in this order, so that collectives of
        overlapping groups cannot wait for each other in a circle.
    """
    by_owners: dict[tuple[int, ...], list[Slab]] = {}
    for slab, (owners,) in segments(holdings).items():
        by_owners.setdefault(tuple(sorted(owners)), []).append(slab)
    return tuple(
        SyncDomain(owners=owners, slabs=tuple(slabs)) for owners, slabs in sorted(by_owners.items())
    )


def require_complete(shapes: Mapping[str, tuple[int, ...]], holdings: Holdings) -> None:
    """Checks that every element of every logical tensor has an owner.

    Raises:
        StateError: a tensor that is not held as a whole, or one that does not exist.
    """
    held = dict.fromkeys(shapes, 0)
    for slab in segments(holdings):
        shape = shapes.get(slab.tensor)
        if shape is None or len(shape) != len(slab.high):
            raise StateError(f"{slab} is held, but the model has no such tensor (shape {shape})")
        if any(high > size for high, size in zip(slab.high, shape, strict=True)):
            raise StateError(f"{slab} reaches beyond the shape {shape}")
        held[slab.tensor] += slab.elements
    for tensor, count in held.items():
        if count != math.prod(shapes[tensor]):
            raise StateError(
                f"{tensor}: the ranks hold {count} of {math.prod(shapes[tensor])} elements"
            )
