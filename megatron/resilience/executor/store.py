"""What a rank has in memory of the logical state, readable and writable by slab."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from megatron.resilience.executor.buffers import MASTER, DomainBuffer
from megatron.resilience.executor.manifest import Piece
from resihp_ext.state.slab import Slab, StateError

WEIGHT = "weight"
"""The modules' own weights, among the kinds of state."""


class Store:
    """Slabs of one kind of state, each with a view of where its elements are."""

    def __init__(self, entries: Iterable[tuple[Slab, torch.Tensor]], dtype: torch.dtype) -> None:
        """Indexes ``(slab, tensor in the slab's shape)``.

        Args:
            dtype: In which elements travel.
        """
        self.dtype = dtype
        self._entries: dict[tuple[str, int], list[tuple[Slab, torch.Tensor]]] = {}
        self._slabs: list[tuple[Slab, torch.Tensor]] = list(entries)
        for entry in self._slabs:
            for key in _keys(entry[0]):
                self._entries.setdefault(key, []).append(entry)

    def read(self, slab: Slab, into: torch.Tensor) -> None:
        """Copies a slab, which must be here as a whole, into a flat tensor.

        Raises:
            StateError: a part of it is not here.
        """
        whole, found = into.view(slab.shape), 0
        for common, view in self._once(slab):
            whole[common.inside(slab)].copy_(view)
            found += common.elements
        if found < slab.elements:
            raise StateError(f"{slab} is not in memory as a whole")

    def write(self, slab: Slab, values: torch.Tensor) -> None:
        """Copies a flat tensor to wherever parts of the slab are, also to several places."""
        whole = values.view(slab.shape)
        for common, view in self.parts(slab):
            view.copy_(whole[common.inside(slab)])

    def flat(self, slab: Slab) -> torch.Tensor | None:
        """Flat view of a slab that lies in memory in one piece, and in no other place."""
        found = list(self.parts(slab))
        if not found or found[0][0] != slab:
            return None
        view = found[0][1]
        if any(other.data_ptr() != view.data_ptr() for _, other in found):
            return None
        return view.view(-1) if view.is_contiguous() and view.dtype == self.dtype else None

    def take(self, other: Store) -> None:
        """Copies everything that another store has as well."""
        for slab, tensor in self._slabs:
            for common, view in other._once(slab):
                mine = tensor[common.inside(slab)]
                if mine.data_ptr() != view.data_ptr():
                    mine.copy_(view)

    def _once(self, slab: Slab) -> list[tuple[Slab, torch.Tensor]]:
        """Parts of a slab, without those that lie in a part named before: copies of it."""
        found: list[tuple[Slab, torch.Tensor]] = []
        for common, view in self.parts(slab):
            if not any(common.intersection(one) == common for one, _ in found):
                found.append((common, view))
        return found

    def parts(self, slab: Slab) -> Iterator[tuple[Slab, torch.Tensor]]:
        """Every part of a slab that is here, with its view; what is here twice comes twice."""
        seen: set[int] = set()
        for key in _keys(slab):
            for one, tensor in self._entries.get(key, ()):
                common = one.intersection(slab)
                if common is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield common, tensor[common.inside(one)]


def _keys(slab: Slab) -> Iterator[tuple[str, int]]:
    """Where to look for a slab: tensors of many layers, which are their first axis, by layer."""
    if len(slab.low) < 3:
        yield slab.tensor, 0
        return
    for layer in range(slab.low[0], slab.high[0]):
        yield slab.tensor, layer


def state_stores(
    buffers: Sequence[DomainBuffer], kinds: Mapping[str, torch.dtype]
) -> dict[str, Store]:
    """Stores over what the optimizer keeps, by kind.

    Args:
        kinds: In which elements each kind travels.
    """
    return {
        kind: Store((entry for buffer in buffers for entry in buffer.entries(kind)), dtype)
        for kind, dtype in kinds.items()
    }


def weight_store(
    buffers: Sequence[DomainBuffer],
    pieces: Sequence[Piece],
    dtype: torch.dtype,
    *,
    masters: bool = True,
) -> Store:
    """Weights wherever they are: in modules, and as masters.

    Args:
        masters: Whether to look at masters at all.
    """
    shared = {buffer.state[MASTER].untyped_storage().data_ptr() for buffer in buffers}
    entries = [
        (piece.slab, piece.of(piece.parameter.data))
        for piece in pieces
        if not masters or piece.parameter.untyped_storage().data_ptr() not in shared
    ]
    if masters:
        entries += [entry for buffer in buffers for entry in buffer.entries(MASTER)]
    return Store(entries, dtype)
