"""Best-fit packing of whole documents into sequences of a fixed length.

Best-fit decreasing, as in Ding et al., "Fewer Truncations Improve Language Modeling" (ICML 2024,
arXiv 2404.10830): documents from long to short, each into the fullest sequence that still has room.
Only a document longer than a sequence is cut. Pure and deterministic: the same lengths give the
same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from resihp_ext.errors import UserError

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Which segments make up each sequence, in order.

    Segment ``k`` is ``lengths[k]`` tokens of document ``documents[k]`` from ``offsets[k]`` on;
    sequence ``b`` holds the segments ``starts[b]:starts[b + 1]``.
    """

    capacity: int
    """Tokens in a sequence."""
    documents: Int64
    offsets: Int64
    lengths: Int64
    starts: Int64

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.starts) - 1

    @property
    def fill_ratio(self) -> float:
        """Tokens that belong to documents over all tokens; 1.0 leaves no padding."""
        return float(self.lengths.sum()) / max(1, self.sequences * self.capacity)


def cut_long(lengths: Int64, capacity: int) -> tuple[Int64, Int64, Int64]:
    """Cuts documents into pieces of at most ``capacity`` tokens.

    Returns:
        Document, offset in the document and length of every piece, in document order. Empty
        documents give no piece.
    """
    pieces = -(-lengths // capacity)
    documents = np.repeat(np.arange(len(lengths), dtype=np.int64), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = (np.arange(len(documents), dtype=np.int64) - first) * capacity
    return documents, offsets, np.minimum(lengths[documents] - offsets, capacity)


def pack_best_fit(lengths: Int64, capacity: int) -> Packing:
    """Packs documents of the given lengths (tokens) into sequences of ``capacity`` tokens.

    Raises:
        UserError: ``capacity`` is not positive, or a length is negative.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if capacity < 1:
        raise UserError(f"packing: sequence length {capacity} is not positive; raise --seq-length")
    if lengths.size and lengths.min() < 0:
        raise UserError(f"packing: document {int(lengths.argmin())} has a negative length")
    documents, offsets, sizes = cut_long(lengths, capacity)
    order = np.argsort(-sizes, kind="stable")
    bins = _assign(sizes[order].tolist(), capacity)
    chosen = order[np.fromiter((k for b in bins for k in b), np.int64, count=len(order))]
    starts = np.cumsum([0, *(len(b) for b in bins)], dtype=np.int64)
    return Packing(
        capacity=capacity,
        documents=documents[chosen],
        offsets=offsets[chosen],
        lengths=sizes[chosen],
        starts=starts,
    )


def _assign(sizes: list[int], capacity: int) -> list[list[int]]:
    """Puts items, given from large to small, into bins; returns the item numbers of each bin.

    Open bins are kept by their free space. ``free`` is the set of free spaces in use, as bits of
    one integer: the best fit is its lowest bit at or above the item's size.
    """
    bins: list[list[int]] = []
    by_space: list[list[int]] = [[] for _ in range(capacity + 1)]
    free = 0
    for item, size in enumerate(sizes):
        fitting = free >> size
        if fitting:
            space = size + (fitting & -fitting).bit_length() - 1
            chosen = by_space[space].pop()
            if not by_space[space]:
                free ^= 1 << space
        else:
            space, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(item)
        left = space - size
        if left:
            by_space[left].append(chosen)
            free |= 1 << left
    return bins


def segment_bounds(packing: Packing, sequence: int) -> list[tuple[int, int, int, int]]:
    """Segments of one sequence as (document, offset in document, start, stop in the sequence)."""
    low, high = packing.starts[sequence], packing.starts[sequence + 1]
    edges = np.cumsum([0, *packing.lengths[low:high]]).tolist()
    return [
        (int(packing.documents[k]), int(packing.offsets[k]), start, stop)
        for k, (start, stop) in zip(range(low, high), pairwise(edges), strict=True)
    ]


def squared_lengths(edges: Sequence[int]) -> int:
    """Sum of the squared lengths of the segments between edges in ascending order (tokens)."""
    return sum((stop - start) ** 2 for start, stop in pairwise(edges))
