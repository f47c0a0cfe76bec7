"""Moves state between ranks after a change of layout: what is lacking, once, and checked.

Transfers of a pair travel as messages of bounded size, packed while earlier ones are on their way.
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
from resihp_ext.state.slab import Slab, StateError
from resihp_ext.state.transfer import Transfer

_MESSAGE_ELEMENTS = 1 << 20
"""Of a message: 4 MB of fp32."""
_WINDOW = 4
"""Messages begun at a time, in either direction."""


@dataclass(frozen=True, slots=True)
class Item:
    """A slab of one kind of state on its way."""

    kind: str
    slab: Slab


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends another at a time."""

    source: int
    destination: int
    items: tuple[Item, ...]

    @property
    def elements(self) -> int:
        return sum(item.slab.elements for item in self.items)

    @property
    def bytes(self) -> int:
        """Of the state in it."""
        return 4 * self.elements


def messages(transfers: Mapping[str, Sequence[Transfer]]) -> list[Message]:
    """Cuts and packs the transfers of all kinds; the same list, in the same order, on all ranks."""
    pairs: dict[tuple[int, int], list[Item]] = {}
    for kind, moves in transfers.items():
        for move in moves:
            items = pairs.setdefault((move.source, move.destination), [])
            items += [Item(kind, part) for part in _cut(move.slab)]
    packed = []
    for (source, destination), items in pairs.items():
        for turn, group in enumerate(_packed(items)):
            # Turn by turn, so that all pairs are on their way at once.
            packed.append((turn, source, destination, Message(source, destination, tuple(group))))
    return [entry[-1] for entry in sorted(packed, key=lambda entry: entry[:3])]


def _cut(slab: Slab) -> Iterator[Slab]:
    """Parts of a slab small enough for a message, cut along its longest axis."""
    if slab.elements <= _MESSAGE_ELEMENTS or max(slab.shape) == 1:
        yield slab
        return
    axis = slab.shape.index(max(slab.shape))
    middle = (slab.low[axis] + slab.high[axis]) // 2
    yield from _cut(slab.cut(axis, slab.low[axis], middle))
    yield from _cut(slab.cut(axis, middle, slab.high[axis]))


def _packed(items: Sequence[Item]) -> Iterator[list[Item]]:
    group: list[Item] = []
    size = 0
    for item in items:
        if group and size + item.slab.elements > _MESSAGE_ELEMENTS:
            yield group
            group, size = [], 0
        group.append(item)
        size += item.slab.elements
    if group:
        yield group


def run(
    todo: Sequence[Message],
    *,
    rank: int,
    sources: Mapping[str, Store],
    targets: Mapping[str, Store],
    device: torch.device,
) -> tuple[int, int]:
    """Sends and receives this rank's messages.

    Returns:
        Bytes sent and received.

    Raises:
        StateError: a slab arrived with another checksum than it was sent with.
    """
    begun: deque[tuple[Message, Any, torch.Tensor]] = deque()
    moved = [0, 0]
    for number, message in enumerate(todo):
        if rank not in (message.source, message.destination):
            continue
        if len(begun) >= _WINDOW:
            _finish(*begun.popleft(), rank, targets)
        buffer = torch.empty(message.elements + 2 * len(message.items), device=device)
        if message.source == rank:
            _pack(message, buffer, sources)
            work = dist.isend(buffer, message.destination, tag=number)
        else:
            work = dist.irecv(buffer, message.source, tag=number)
        moved[message.destination == rank] += 4 * message.elements
        begun.append((message, work, buffer))
    while begun:
        _finish(*begun.popleft(), rank, targets)
    return moved[0], moved[1]


def _pack(message: Message, buffer: torch.Tensor, sources: Mapping[str, Store]) -> None:
    """Slabs one after the other, then their checksums."""
    at, sums = 0, []
    for item in message.items:
        part = buffer[at : at + item.slab.elements]
        sources[item.kind].read(item.slab, part)
        sums.append(_signed(checksum(part)))
        at += item.slab.elements
    buffer[at:].view(torch.int32).copy_(torch.tensor(sums).view(torch.int32))


def _finish(
    message: Message, work: Any, buffer: torch.Tensor, rank: int, targets: Mapping[str, Store]
) -> None:
    work.wait()
    if message.destination != rank:
        return
    sums = buffer[message.elements :].cpu().clone().view(torch.int32).view(torch.int64).tolist()
    at = 0
    for item, expected in zip(message.items, sums, strict=True):
        part = buffer[at : at + item.slab.elements]
        if _signed(checksum(part)) != expected:
            raise StateError(
                f"{item.kind} of {item.slab} from rank {message.source} to rank {rank}: "
                "arrived with another checksum than it was sent with"
            )
        targets[item.kind].write(item.slab, part)
        at += item.slab.elements


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned
