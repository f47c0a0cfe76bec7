"""Moves state between ranks after a change of layout: what is lacking, once, and checked.

Transfers of a pair travel as messages of bounded size. A large slab goes straight from where it
lies to where it belongs if it lies there in one piece; the rest is packed. Afterwards both ends sum
up what has travelled, packed slabs already on their way, and compare.

All messages have one global order. What needs no buffer is begun at once, the rest in that order as
long as there are buffers: the earliest that is not finished has both its ends begun, so nothing
waits in a circle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.resilience.executor.checksum import checksum
from megatron.resilience.executor.store import Store
from megatron.resilience.executor.world import World
from resihp_ext.state.slab import Slab
from resihp_ext.state.transfer import Transfer

_MESSAGE_BYTES = 8 << 20
_ALONE_BYTES = 1 << 18
"""From this size on a slab is a message of its own, so that it need not be packed."""
_PACKED_BYTES = 1 << 20
"""Most that is packed into a message of several slabs: it stays in a processor's cache."""
_BUFFER_BYTES = 32 << 20
"""Packed messages that are on their way at a time: bounds the memory."""


@dataclass(frozen=True, slots=True)
class Item:
    """A slab of one kind of state on its way."""

    kind: str
    slab: Slab
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * self.slab.elements


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends another at a time."""

    source: int
    destination: int
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        """Of the state in it."""
        return sum(item.bytes for item in self.items)


def messages(
    transfers: Mapping[str, Sequence[Transfer]], dtypes: Mapping[str, torch.dtype]
) -> list[Message]:
    """Cuts and packs the transfers of all kinds; the same list, in the same order, on all ranks.

    Args:
        dtypes: In which elements of each kind travel.
    """
    pairs: dict[tuple[int, int], list[Item]] = {}
    # Wide elements first: in a packed message all are aligned then.
    for kind in sorted(transfers, key=lambda kind: -dtypes[kind].itemsize):
        for move in transfers[kind]:
            items = pairs.setdefault((move.source, move.destination), [])
            items += [Item(kind, part, dtypes[kind]) for part in _cut(move.slab, dtypes[kind])]
    packed = []
    for (source, destination), items in pairs.items():
        for turn, group in enumerate(_packed(items)):
            # Turn by turn, so that all pairs are on their way at once.
            packed.append((turn, source, destination, Message(source, destination, tuple(group))))
    return [entry[-1] for entry in sorted(packed, key=lambda entry: entry[:3])]


def _cut(slab: Slab, dtype: torch.dtype) -> Iterator[Slab]:
    """Parts of a slab that are small enough for a message, and lie in one piece if it does.

    Layers lie apart, though checkpoints stack the matrices of all layers; everything else is cut
    along its first axis that can be cut.
    """
    layers = len(slab.shape) > 2 and slab.shape[0] > 1
    if slab.elements * dtype.itemsize <= _MESSAGE_BYTES and not layers:
        yield slab
        return
    axis = next(axis for axis, size in enumerate(slab.shape) if size > 1)
    middle = (slab.low[axis] + slab.high[axis]) // 2
    yield from _cut(slab.cut(axis, slab.low[axis], middle), dtype)
    yield from _cut(slab.cut(axis, middle, slab.high[axis]), dtype)


def _packed(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Messages of one pair: large items alone, small ones together."""
    group: list[Item] = []
    size = 0
    for item in items:
        if item.bytes >= _ALONE_BYTES:
            yield [item]
            continue
        if group and size + item.bytes > _PACKED_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += item.bytes
    if group:
        yield group


@dataclass(slots=True, eq=False)
class _Part:
    """A message of this rank."""

    number: int
    """Among the messages of all ranks."""
    message: Message
    place: torch.Tensor | None
    """Where its only slab lies in one piece here, flat; otherwise it is packed."""
    buffer: torch.Tensor | None = None
    """Where it is packed, while it is on its way."""
    work: Any = None

    @property
    def values(self) -> list[torch.Tensor]:
        """Of each item, flat."""
        if self.place is not None:
            return [self.place]
        assert self.buffer is not None
        found, at = [], 0
        for item in self.message.items:
            found.append(self.buffer[at : at + item.bytes].view(item.dtype))
            at += item.bytes
        return found

    @property
    def whole(self) -> torch.Tensor:
        """What travels, as bytes: both ends need not agree on where it lies."""
        if self.place is not None:
            return self.place.view(torch.uint8)
        assert self.buffer is not None
        return self.buffer[: self.message.bytes]


class Move:
    """One rank's side of a move."""

    def __init__(
        self,
        todo: Sequence[Message],
        *,
        rank: int,
        sources: Mapping[str, Store],
        targets: Mapping[str, Store],
        device: torch.device,
        world: World,
    ) -> None:
        """Looks where everything lies.

        Args:
            todo: Messages of all ranks.
            world: The ranks that are connected.
        """
        self._number = world.number
        self.todo = todo
        self._rank = rank
        self._sources = sources
        self._targets = targets
        self._device = device
        self._parts = [
            _Part(number, message, self._place(message))
            for number, message in enumerate(todo)
            if rank in (message.source, message.destination)
        ]
        self._begun: dict[_Part, None] = {}
        """In the order of their beginning."""
        self._free = self._buffers()
        self._sums: dict[_Part, list[int]] = {}

    def _buffers(self) -> list[torch.Tensor]:
        """Memory for packed messages, each as large as the largest."""
        sizes = [part.message.bytes for part in self._parts if part.place is None]
        # Whole words, so that elements of any width are aligned in each.
        size = -(-max(sizes, default=1) // 8) * 8
        count = min(len(sizes), max(_BUFFER_BYTES // size, 1))
        # Written once, so that the system need not hand out pages during the move.
        memory = torch.empty(count * size, dtype=torch.uint8, device=self._device).zero_()
        return list(memory.view(count, size))

    def run(self) -> None:
        """Sends and receives everything; collective over all ranks with messages."""
        parts = self._parts
        if dist.get_backend() == "gloo":
            # Its messages find each other by tags; with NCCL both ends need the same order, and
            # what needs no buffer here may need one there.
            parts = sorted(parts, key=lambda part: part.place is None)
        for part in parts:
            self._begin(part)
        while self._begun:
            self._finish(next(iter(self._begun)))

    def _place(self, message: Message) -> torch.Tensor | None:
        if len(message.items) > 1:
            return None
        stores = self._sources if message.source == self._rank else self._targets
        return stores[message.items[0].kind].flat(message.items[0].slab)

    def _begin(self, part: _Part) -> None:
        if part.place is None:
            if not self._free:
                self._finish(next(one for one in self._begun if one.buffer is not None))
            part.buffer = self._free.pop()
        self._begun[part] = None
        if part.message.destination == self._rank:
            part.work = dist.irecv(part.whole, self._number(part.message.source), tag=part.number)
            return
        if part.place is None:
            for item, values in zip(part.message.items, part.values, strict=True):
                self._sources[item.kind].read(item.slab, values)
        part.work = dist.isend(part.whole, self._number(part.message.destination), tag=part.number)

    def _sum_up(self, part: _Part) -> None:
        self._sums[part] = [checksum(values) for values in part.values]

    def _finish(self, part: _Part) -> None:
        part.work.wait()
        del self._begun[part]
        if part.buffer is not None:
            self._sum_up(part)
            if part.message.destination == self._rank:
                for item, values in zip(part.message.items, part.values, strict=True):
                    self._targets[item.kind].write(item.slab, values)
            self._free.append(part.buffer)
            part.buffer = None

    def damaged(self) -> list[str]:
        """Exchanges checksums with all that this rank has exchanged state with, and compares.

        Returns:
            What arrived with another checksum than it was sent with, in words.
        """
        pairs: dict[tuple[int, int], list[_Part]] = {}
        for part in self._parts:
            if part.place is not None:
                self._sum_up(part)
            pairs.setdefault((part.message.source, part.message.destination), []).append(part)
        begun: list[tuple[list[_Part], list[int], torch.Tensor, Any]] = []
        for (source, destination), parts in sorted(pairs.items(), key=lambda pair: pair[0]):
            mine = [one for part in parts for one in self._sums[part]]
            told = torch.tensor(mine, dtype=torch.int64).to(self._device)
            if source == self._rank:
                work: Any = dist.isend(told, self._number(destination), tag=len(self.todo))
            else:
                told = torch.empty_like(told)
                work = dist.irecv(told, self._number(source), tag=len(self.todo))
            begun.append((parts, mine, told, work))
        found = []
        for parts, mine, told, work in begun:
            work.wait()
            items = [(part.message, item) for part in parts for item in part.message.items]
            for (message, item), here, there in zip(items, mine, told.tolist(), strict=True):
                if here != there:
                    found.append(
                        f"{item.kind} of {item.slab} from rank {message.source} to rank "
                        f"{message.destination} arrived with another checksum than it was sent with"
                    )
        return found
