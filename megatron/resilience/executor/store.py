"""What a rank has in memory of the logical state, readable and writable by slab."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron.resilience.executor.buffers import DomainBuffer
from megatron.resilience.executor.manifest import Piece
from resihp_ext.state.slab import Slab, StateError

WEIGHT = "weight"
"""The modules' own weights, among the kinds of state."""


class Store:
    """Slabs of one kind of state, each with a view of where its elements are."""

    def __init__(self, entries: Iterable[tuple[Slab, torch.Tensor]]) -> None:
        """Indexes ``(slab, tensor in the slab's shape)``."""
        self._entries: dict[str, list[tuple[Slab, torch.Tensor]]] = {}
        for slab, tensor in entries:
            self._entries.setdefault(slab.tensor, []).append((slab, tensor))

    def read(self, slab: Slab, into: torch.Tensor) -> None:
        """Copies a slab, which must be here as a whole, into a flat tensor.

        Raises:
            StateError: a part of it is not here.
        """
        whole = into.view(slab.shape)
        if self._each(slab, lambda here, there: whole[there].copy_(here)) < slab.elements:
            raise StateError(f"{slab} is not in memory as a whole")

    def write(self, slab: Slab, values: torch.Tensor) -> None:
        """Copies a flat tensor to wherever parts of the slab are, also to several places."""
        whole = values.view(slab.shape)
        self._each(slab, lambda here, there: here.copy_(whole[there]))

    def take(self, other: Store) -> None:
        """Copies everything that another store has as well."""
        for entries in self._entries.values():
            for slab, tensor in entries:
                other._each(slab, lambda theirs, cut, tensor=tensor: tensor[cut].copy_(theirs))

    def _each(self, slab: Slab, act: object) -> int:
        """Acts on every part that is here: ``act(view, its place in the slab)``.

        Returns:
            How many elements that were; what is here twice counts twice.
        """
        found = 0
        for one, tensor in self._entries.get(slab.tensor, ()):
            common = one.intersection(slab)
            if common is not None:
                act(tensor[common.inside(one)], common.inside(slab))  # type: ignore[operator]
                found += common.elements
        return found


def stores_of(
    buffers: Sequence[DomainBuffer], pieces: Sequence[Piece], kinds: Iterable[str]
) -> Mapping[str, Store]:
    """Stores over a rank's buffers and modules, by kind."""
    return {
        kind: Store(
            ((piece.slab, piece.of(piece.parameter.data)) for piece in pieces)
            if kind == WEIGHT
            else (entry for buffer in buffers for entry in buffer.entries(kind))
        )
        for kind in kinds
    }
