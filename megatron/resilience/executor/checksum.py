"""Checksums of tensors on their way, and a digest of the logical state that no layout changes."""

from __future__ import annotations

import hashlib
from functools import lru_cache

import torch

from resihp_ext.state.slab import Slab

_BLOCK = 512
"""Words of 8 bytes in a block of a checksum."""
_DIGESTED = 1 << 20
"""Elements that a digest widens at a time: bounds its memory to 8 MB."""
_MASK = (1 << 64) - 1


def checksum(flat: torch.Tensor) -> int:
    """Signed 64-bit checksum of a flat tensor's bytes: sums of blocks, weighted by their place.

    In the manner of Fletcher ("An arithmetic checksum for serial transmissions", 1982). A changed
    bit always changes it, exchanged blocks all but surely. It runs at the speed of memory, which a
    finer order would not; that elements are at their places is for :func:`digest` to prove.
    """
    words = _words(flat)
    whole = len(words) - len(words) % _BLOCK
    sums = [words[:whole].view(-1, _BLOCK).sum(1), words[whole:].sum(0, keepdim=True)]
    one = torch.cat(sums)
    return int(_dot(one, _weights(0, len(one), 0, flat.device)))


def digest(slab: Slab, values: torch.Tensor) -> int:
    """Digest of the bits of a slab's elements at their places in the logical tensor.

    Digests of disjoint slabs add up (modulo 2**64) to the digest of their union, however it is cut:
    every element counts by its bits times an odd number made from its place.

    Args:
        values: fp32, in the slab's shape.
    """
    weights = [
        _weights(low, high, axis, values.device)
        # A scalar is a vector of one element.
        for axis, (low, high) in enumerate(zip(slab.low or (0,), slab.high or (1,), strict=True))
    ]
    bits = values.view(slab.shape or (1,)).view(torch.int32)
    sums = _row_sums(bits, weights.pop())
    while weights:
        sums = _dot(sums, weights.pop())
    salt = int.from_bytes(hashlib.blake2b(slab.tensor.encode(), digest_size=8).digest(), "little")
    return int(sums) * (salt | 1) & _MASK


def _row_sums(bits: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sums over the last axis, some rows at a time."""
    if bits.ndim == 1:
        return _dot(bits.to(torch.int64), weights)
    rows = max(1, _DIGESTED // len(weights))
    parts = bits.flatten(0, -2).split(rows)
    sums = torch.cat([_dot(part.to(torch.int64), weights) for part in parts])
    return sums.view(bits.shape[:-1])


def _words(flat: torch.Tensor) -> torch.Tensor:
    """The bytes as int64, with zeros behind them where they are no whole words."""
    whole = flat.view(torch.uint8)
    if len(whole) % 8 or whole.storage_offset() % 8:
        whole = torch.cat([whole, whole.new_zeros(-len(whole) % 8)])
    return whole.view(torch.int64)


def _dot(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sums over the last axis, modulo the type's range."""
    if rows.device.type == "cpu":
        return rows @ weights
    # CUDA multiplies no matrices of integers.
    return (rows * weights).sum(-1, dtype=rows.dtype)


@lru_cache(maxsize=64)
def _weights(low: int, high: int, axis: int, device: torch.device) -> torch.Tensor:
    """Odd numbers for the places ``low`` to ``high`` of an axis, of 64 random bits each.

    SplitMix64's finaliser (Steele, Lea, Flood: "Fast splittable pseudorandom number generators",
    OOPSLA 2014), of place and axis. With plain place numbers, an element and its mirror image in
    a square would count the same.
    """
    bits = torch.arange(low, high, dtype=torch.int64, device=device) + (axis << 48)
    bits = (bits + 1) * _signed(0x9E3779B97F4A7C15)
    bits = (bits ^ _shift(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shift(bits, 27)) * _signed(0x94D049BB133111EB)
    return (bits ^ _shift(bits, 31)) | 1


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


def _shift(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Logical right shift; torch's ``>>`` copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
