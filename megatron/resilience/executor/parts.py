"""The same elements in a flat buffer and in the modules of a rank: copied, or the same memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.resilience.executor.manifest import Piece
from resihp_ext.state.slab import Slab


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The same elements in a flat buffer and in a module."""

    flat: torch.Tensor
    local: torch.Tensor
    parameter: torch.nn.Parameter
    copies: int
    again: bool
    """Whether an earlier part of the list has the same elements, as when two model chunks of a
    rank hold the same tensor."""


def parts(
    flat: torch.Tensor,
    slabs: Sequence[Slab],
    pieces: Iterable[Piece],
    tensor_of: Callable[[Piece], torch.Tensor],
) -> Iterator[Part]:
    """Matches slabs that follow each other in a flat tensor with what modules hold of them."""
    by_tensor: dict[str, list[Piece]] = {}
    for piece in pieces:
        by_tensor.setdefault(piece.slab.tensor, []).append(piece)
    low = 0
    for slab in slabs:
        whole = flat[low : low + slab.elements].view(slab.shape)
        low += slab.elements
        seen: set[Slab] = set()
        for piece in by_tensor.get(slab.tensor, ()):
            common = slab.intersection(piece.slab)
            if common is None:
                continue
            yield Part(
                whole[common.inside(slab)],
                piece.of(tensor_of(piece))[common.inside(piece.slab)],
                piece.parameter,
                piece.copies,
                common in seen,
            )
            seen.add(common)


def in_one_piece(flat: torch.Tensor, found: Sequence[Part]) -> dict[Part, torch.Tensor]:
    """Finds parameters that lie in a flat tensor exactly as they lie in memory.

    Returns:
        For each part of such a parameter, the flat tensor's view in the parameter's shape.
    """
    by_parameter: dict[int, list[Part]] = {}
    for part in found:
        by_parameter.setdefault(id(part.parameter), []).append(part)
    views: dict[Part, torch.Tensor] = {}
    for mine in by_parameter.values():
        view = _whole_view(flat, mine)
        if view is not None:
            views.update(dict.fromkeys(mine, view))
    return views


def _whole_view(flat: torch.Tensor, mine: Sequence[Part]) -> torch.Tensor | None:
    """View of a parameter's parts as one, if they follow each other in both places alike."""
    parameter = mine[0].parameter
    ordered = sorted(mine, key=lambda part: part.local.storage_offset())
    first = ordered[0]
    if sum(part.flat.numel() for part in ordered) != parameter.numel():
        return None
    for part in ordered:
        ahead = part.flat.storage_offset() - first.flat.storage_offset()
        if (
            part.again
            or not (part.flat.is_contiguous() and part.local.is_contiguous())
            or part.local.storage_offset() - first.local.storage_offset() != ahead
        ):
            return None
    return flat.as_strided(parameter.shape, parameter.stride(), first.flat.storage_offset())
