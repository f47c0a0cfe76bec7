"""Moves state between ranks after a change of layout: what is lacking, once, and checked.

Transfers of a pair travel as messages of bounded size. A large slab goes straight from where it
lies to where it belongs if it lies there in one piece; the rest is packed. While a message travels,
the sender sums up what it sent, the receiver what came before; the checksums of a pair follow at
the end.

All messages have one global order, and every rank works through its own in that order, with a few
begun at a time: the earliest that is not finished has both its ends begun, so nothing waits in a
circle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.resilience.executor.checksum import checksum
from megatron.resilience.executor.store import Store
from resihp_ext.state.slab import Slab
from resihp_ext.state.transfer import Transfer

_MESSAGE_BYTES = 4 << 20
_ALONE_BYTES = 1 << 18
"""From this size on a slab is a message of its own, so that it need not be packed."""
_WINDOW = 8
"""Messages begun at a time, in either direction: bounds the memory of packed ones."""


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
    """Parts of a slab small enough for a message: cut along its first axis that can be cut, so that
    parts of what lies in one piece do so as well."""
    if slab.elements * dtype.itemsize <= _MESSAGE_BYTES:
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
        if group and size + item.bytes > _MESSAGE_BYTES:
            yield group
            group, size = [], 0
        group.append(item)
        size += item.bytes
    if group:
        yield group


def run(
    todo: Sequence[Message],
    *,
    rank: int,
    sources: Mapping[str, Store],
    targets: Mapping[str, Store],
    device: torch.device,
) -> list[str]:
    """Sends and receives this rank's messages.

    Returns:
        What arrived with another checksum than it was sent with, in words.
    """
    mover = _Mover(rank, sources, targets, device)
    for number, message in enumerate(todo):
        if message.source == rank:
            mover.send(number, message)
        elif message.destination == rank:
            mover.receive(number, message)
    mover.finish_all()
    return mover.damaged(len(todo))


@dataclass(slots=True)
class _Begun:
    """A message on its way."""

    message: Message
    work: Any
    values: list[torch.Tensor]
    """Of each item, flat."""
    buffer: torch.Tensor | None
    """What they are parts of, for a message that does not go straight from or to its place."""


class _Mover:
    """One rank's side of a move."""

    def __init__(
        self,
        rank: int,
        sources: Mapping[str, Store],
        targets: Mapping[str, Store],
        device: torch.device,
    ) -> None:
        self._rank = rank
        self._sources = sources
        self._targets = targets
        self._device = device
        self._begun: deque[_Begun] = deque()
        self._buffers: list[torch.Tensor] = []
        self._sums: dict[tuple[int, int], list[tuple[Item, int]]] = {}

    def send(self, number: int, message: Message) -> None:
        """Begins to send a message."""
        one = self._prepared(message, self._sources)
        if one.buffer is not None:
            for item, values in zip(message.items, one.values, strict=True):
                self._sources[item.kind].read(item.slab, values)
        one.work = dist.isend(self._whole(one), message.destination, tag=number)
        self._begun.append(one)
        self._sum_up(one)

    def receive(self, number: int, message: Message) -> None:
        """Begins to receive a message."""
        one = self._prepared(message, self._targets)
        one.work = dist.irecv(self._whole(one), message.source, tag=number)
        self._begun.append(one)

    def finish_all(self) -> None:
        """Waits for everything that is begun."""
        while self._begun:
            self._finish()

    def damaged(self, count: int) -> list[str]:
        """Exchanges checksums with all that this rank has exchanged state with, and compares.

        Args:
            count: Messages of all ranks.
        """
        pairs = sorted(self._sums)
        works: list[Any] = []
        told = []
        for pair in pairs:
            sums = torch.tensor(
                [_signed(one) for _, one in self._sums[pair]], dtype=torch.int64
            ).to(self._device)
            sending = pair[0] == self._rank
            told.append(sums if sending else torch.empty_like(sums))
            works.append(
                dist.isend(told[-1], pair[1], tag=count)
                if sending
                else dist.irecv(told[-1], pair[0], tag=count)
            )
        found = []
        for pair, work, sums in zip(pairs, works, told, strict=True):
            work.wait()
            for (item, mine), theirs in zip(self._sums[pair], sums.tolist(), strict=True):
                if _signed(mine) != theirs:
                    found.append(
                        f"{item.kind} of {item.slab} from rank {pair[0]} to rank {pair[1]} "
                        "arrived with another checksum than it was sent with"
                    )
        return found

    def _prepared(self, message: Message, stores: Mapping[str, Store]) -> _Begun:
        """Where the values of a message are or will be."""
        if len(self._begun) >= _WINDOW:
            self._finish()
        first = message.items[0]
        place = stores[first.kind].flat(first.slab) if len(message.items) == 1 else None
        if place is not None:
            return _Begun(message, None, [place], None)
        buffer = (
            self._buffers.pop()
            if self._buffers
            else torch.empty(_MESSAGE_BYTES, dtype=torch.uint8, device=self._device)
        )
        values, at = [], 0
        for item in message.items:
            values.append(buffer[at : at + item.bytes].view(item.dtype))
            at += item.bytes
        return _Begun(message, None, values, buffer)

    @staticmethod
    def _whole(one: _Begun) -> torch.Tensor:
        """What travels, as bytes: both ends need not agree on where it lies."""
        if one.buffer is None:
            return one.values[0].view(torch.uint8)
        return one.buffer[: one.message.bytes]

    def _finish(self) -> None:
        one = self._begun.popleft()
        one.work.wait()
        if one.message.destination == self._rank:
            self._sum_up(one)
            if one.buffer is not None:
                for item, values in zip(one.message.items, one.values, strict=True):
                    self._targets[item.kind].write(item.slab, values)
        if one.buffer is not None:
            self._buffers.append(one.buffer)

    def _sum_up(self, one: _Begun) -> None:
        pair = one.message.source, one.message.destination
        sums = self._sums.setdefault(pair, [])
        sums += [
            (item, checksum(values))
            for item, values in zip(one.message.items, one.values, strict=True)
        ]


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned
