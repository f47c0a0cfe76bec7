"""Checksums of tensors on their way, and a digest of the logical state that no layout changes."""

from __future__ import annotations

import hashlib

import torch

from resihp_ext.state.slab import Slab

_BLOCK = 1024
_MASK = (1 << 64) - 1


def checksum(flat: torch.Tensor) -> int:
    """64-bit checksum of a flat fp32 or bf16 tensor: of blocks' sums, weighted by their place.

    In the manner of Fletcher ("An arithmetic checksum for serial transmissions", 1982): a changed
    bit and exchanged blocks change it.
    """
    words = flat.view(torch.int32 if flat.element_size() == 4 else torch.int16)
    blocks = len(words) // _BLOCK
    sums = words[: blocks * _BLOCK].view(blocks, _BLOCK).sum(1, dtype=torch.int64)
    rest = words[blocks * _BLOCK :].sum(dtype=torch.int64)
    weights = torch.arange(1, blocks + 1, dtype=torch.int64, device=flat.device)
    return int((sums * weights).sum() + rest * (blocks + 1)) & _MASK


def digest(slab: Slab, values: torch.Tensor) -> int:
    """Digest of the bits of a slab's elements at their places in the logical tensor.

    Digests of disjoint slabs add up (modulo 2**64) to the digest of their union, however it is cut:
    every element counts by its bits times an odd number made from its place.

    Args:
        values: fp32, in the slab's shape.
    """
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    for axis in reversed(range(bits.ndim)):
        weights = torch.arange(
            2 * slab.low[axis] + 1,
            2 * slab.high[axis] + 1,
            2,
            dtype=torch.int64,
            device=values.device,
        )
        bits = (bits * weights).sum(axis)
    salt = int.from_bytes(hashlib.blake2b(slab.tensor.encode(), digest_size=8).digest(), "little")
    return int(bits) * (salt | 1) & _MASK
