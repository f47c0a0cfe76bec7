"""The logical state of a running job, collected element by element from every rank.

What transitions are judged by. It knows nothing of domains, transfers or digests: every rank writes
all that it holds to its place in arrays that all ranks share, and compares all that it holds with
what is there.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import unwrap_model

from megatron.resilience.model.initial_weights import logical_tensors
from resihp_ext.state.slab import Slab

WEIGHT = "weight"
"""The modules' own weights; what the optimizer keeps goes by its own names."""

MASTER = "master"

Place = tuple[str, Slab]
"""A kind of state and the elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Elements of one kind of state that this rank holds."""

    kind: str
    slab: Slab
    values: torch.Tensor
    """In the slab's shape."""


def parts_of(executor: Any, models: Sequence[torch.nn.Module]) -> list[Part]:
    """All weights of the modules, and all that the optimizer steps and keeps."""
    found = []
    for model in unwrap_model(list(models)):
        for tensor in logical_tensors(model):
            if tensor.data is None:
                continue
            low = tuple(tensor.global_offset)
            size = (1,) * (len(low) - tensor.data.ndim) + tuple(tensor.data.shape)
            high = tuple(a + n for a, n in zip(low, size, strict=True))
            slab = Slab(tensor=tensor.key, low=low, high=high)
            found.append(Part(kind=WEIGHT, slab=slab, values=tensor.data.detach().view(size)))
    for buffer in executor.buffers:
        for kind in buffer.state:
            found += [
                Part(kind=kind, slab=slab, values=values) for slab, values in buffer.entries(kind)
            ]
    return found


def stepped(executor: Any) -> bool:
    """Whether what the base optimizer steps is just the memory that the buffers name."""
    named = {
        (kind, state.data_ptr(), state.numel())
        for buffer in executor.buffers
        for kind, state in buffer.state.items()
        if state.numel()
    }
    spans: dict[str, list[tuple[int, int]]] = {}
    for group in executor.optimizer.param_groups:
        for masters in group["params"]:
            spans.setdefault(MASTER, []).append((masters.data_ptr(), masters.numel()))
            for kind, state in executor.optimizer.optimizer.state[masters].items():
                if kind != "step":
                    spans.setdefault(kind, []).append((state.data_ptr(), state.numel()))
    return all(_covered(base, size, spans.get(kind, ())) for kind, base, size in named) and sum(
        size for _, _, size in named
    ) == sum(n for one in spans.values() for _, n in one)


def _covered(base: int, size: int, spans: Iterable[tuple[int, int]]) -> bool:
    """Whether fp32 spans that begin inside a buffer fill it."""
    return sum(n for at, n in spans if base <= at < base + 4 * size) == size


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Of what the ranks hold, from what is on the board."""

    compared: int
    """Elements of all kinds, those of every owner."""
    differing: int
    """Elements whose bits are others."""
    missing: int
    """Elements that nobody holds."""

    def __bool__(self) -> bool:
        return bool(self.differing or self.missing)


class Board:
    """Arrays of all logical tensors of all kinds, in a file that all ranks map."""

    def __init__(self, file: Path, parts: Sequence[Part]) -> None:
        """Makes room for everything that any rank holds; collective.

        Args:
            file: Where all ranks can map it; made by rank 0.
        """
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(
            everyone, [(part.kind, part.slab.tensor, part.slab.high) for part in parts]
        )
        shapes: dict[tuple[str, str], tuple[int, ...]] = {}
        for kind, tensor, high in (entry for rank in everyone for entry in rank):
            known = shapes.get((kind, tensor), high)
            shapes[kind, tensor] = tuple(map(max, known, high))
        self.shapes: Shapes = shapes
        self._starts: dict[tuple[str, str], int] = {}
        self._size = 0
        for key in sorted(shapes):
            self._starts[key] = self._size
            self._size += math.prod(shapes[key])
        self._file = file
        if dist.get_rank() == 0:
            with file.open("wb") as made:
                made.truncate(5 * self._size)
        dist.barrier()

    def write(self, parts: Sequence[Part]) -> Difference:
        """Puts the state of all ranks on the board, and compares it with that of each; collective.

        Owners of the same element that differ cannot both find their own bits on the board.
        """
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), 5 * self._size) as shared:
            for part in parts:
                values, _ = self._views(shared, part)
                values[...] = _bits(part)
                del values, _
        dist.barrier()
        return self.compare(parts)

    def compare(self, parts: Sequence[Part]) -> Difference:
        """Compares what every rank holds with what is on the board; collective."""
        counts = torch.zeros(3, dtype=torch.int64)
        with self._file.open("r+b") as file, mmap.mmap(file.fileno(), 5 * self._size) as shared:
            if dist.get_rank() == 0:
                np.frombuffer(shared, np.uint8, offset=4 * self._size)[...] = 0
            dist.barrier()
            for part in parts:
                values, seen = self._views(shared, part)
                counts[0] += part.slab.elements
                counts[1] += int((values != _bits(part)).sum())
                seen[...] = 1
                del values, seen
            dist.barrier()
            if dist.get_rank() == 0:
                flags = np.frombuffer(shared, np.uint8, offset=4 * self._size)
                counts[2] = self._size - int(flags.sum(dtype=np.int64))
                del flags
        dist.all_reduce(counts)
        compared, differing, missing = counts.tolist()
        return Difference(compared=compared, differing=differing, missing=missing)

    def _views(self, shared: mmap.mmap, part: Part) -> tuple[np.ndarray, np.ndarray]:
        """Where a part's bits are on the board, and the marks of who has been seen."""
        key = part.kind, part.slab.tensor
        whole = Slab.whole(part.slab.tensor, self.shapes[key])
        found = []
        for kind, base, width in ((np.int32, 0, 4), (np.uint8, 4 * self._size, 1)):
            flat = np.frombuffer(
                shared, kind, whole.elements, offset=base + width * self._starts[key]
            )
            found.append(flat.reshape(whole.shape)[part.slab.inside(whole)])
        return found[0], found[1]


def _bits(part: Part) -> np.ndarray:
    """Bits of the values as fp32; half precision is widened, which loses nothing."""
    return part.values.detach().float().cpu().contiguous().view(torch.int32).numpy()


Shapes = Mapping[tuple[str, str], tuple[int, ...]]
"""Of the logical tensors, by kind of state and name."""


def lacking_bytes(
    before: Iterable[Place], after: Iterable[Place], shapes: Shapes, *, half: bool
) -> int:
    """The least that has to arrive at a rank, counted element by element.

    Masters and fp32 weights are the same values; weights of half precision follow from masters, but
    not the other way round.

    Args:
        before: What the rank held.
        after: What it has to hold.
        half: Whether weights are not fp32.
    """
    had, needs = _masks(before, shapes), _masks(after, shapes)
    total = 0
    for tensor in {tensor for _, tensor in needs}:
        for kind in {kind for kind, name in needs if name == tensor} - {WEIGHT, MASTER}:
            lacks = needs[kind, tensor] & ~had.get((kind, tensor), _NOWHERE)
            total += 4 * int(lacks.sum())
        weight, master = (needs.get((kind, tensor), _NOWHERE) for kind in (WEIGHT, MASTER))
        had_weight, had_master = (had.get((kind, tensor), _NOWHERE) for kind in (WEIGHT, MASTER))
        if half:
            total += 4 * int((master & ~had_master).sum())
            total += 2 * int((weight & ~master & ~had_weight & ~had_master).sum())
        else:
            total += 4 * int(((weight | master) & ~(had_weight | had_master)).sum())
    return total


_NOWHERE = np.zeros((), dtype=bool)


def _masks(places: Iterable[Place], shapes: Shapes) -> dict[tuple[str, str], np.ndarray]:
    """Which elements of each logical tensor a rank holds."""
    masks: dict[tuple[str, str], np.ndarray] = {}
    for kind, slab in places:
        shape = shapes[kind, slab.tensor]
        mask = masks.setdefault((kind, slab.tensor), np.zeros(shape, dtype=bool))
        mask[slab.inside(Slab.whole(slab.tensor, shape))] = True
    return masks
