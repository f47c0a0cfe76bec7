"""Moves activations and gradients between stage instances of any tensor-parallel degrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron.resilience.executor.groups import GroupPool
from megatron.resilience.executor.outbox import Holds, Outbox
from megatron.resilience.executor.place import Seat
from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.boundary import pieces, share
from resihp_ext.plan.plan import Instance, Plan


@dataclass(slots=True)
class Traffic:
    """Bytes that this rank has sent over stage boundaries."""

    sent_bytes: int = 0
    between_nodes_bytes: int = 0


class Stamps(Protocol):
    """Lets messages take longer than they do."""

    def sent(self, peer: int, tag: int) -> tuple[Any, torch.Tensor]:
        """A message has left; gives what is to be kept until it is complete."""

    def arrived(self, plan: Plan, mine: Instance, action: Action, peer: int, tag: int) -> None:
        """A message is here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """What crosses between stages: one tensor of shape ``(rows, samples, hidden)``."""

    rows: int
    """Sequence length in tokens."""
    samples: int
    """Micro-batch size."""
    hidden: int
    dtype: torch.dtype
    device: torch.device


@dataclass
class Wire:
    """The ends of all boundaries of one rank.

    Sends go out in the background and keep their tensors; a receive waits for its parts. Messages
    carry the micro-batch in their tag where the backend has tags (gloo); NCCL matches messages of a
    pair by their order, which the program's check guarantees.
    """

    plan: Plan
    seat: Seat
    pool: GroupPool
    sequence_parallel: bool
    """Whether this rank's activations hold just its share of the rows."""
    traffic: Traffic = field(default_factory=Traffic)
    stamps: Stamps | None = None
    holds: Holds | None = None
    _pending: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    _outbox: Outbox | None = None

    def __post_init__(self) -> None:
        self._node = {device.rank: device.node for device in self.plan.devices}

    def local_rows(self, boundary: Boundary) -> tuple[int, int]:
        """First row and one past the last of what this rank's activations hold."""
        if self.sequence_parallel:
            return share(boundary.rows, self.seat.tp, self.seat.tp_rank)
        return 0, boundary.rows

    def send(self, tensor: torch.Tensor, action: Action, mine: Instance, at: Boundary) -> None:
        """Sends this rank's pieces of a micro-batch's tensor; does not wait."""
        peers = self._peers(action)
        first = self.local_rows(at)[0]
        for piece in pieces(at.rows, self.seat.tp, len(peers)):
            if piece.sender != self.seat.tp_rank:
                continue
            rows = tensor.detach()[piece.low - first : piece.high - first].contiguous()
            peer = peers[piece.receiver]
            self._post(rows, peer, _tag(action, mine))
            if self.stamps is not None:
                self._pending.append(self.stamps.sent(self._number(peer), _tag(action, mine)))
            size = rows.numel() * rows.element_size()
            self.traffic.sent_bytes += size
            if self._node[peer] != self._node[self.seat.rank]:
                self.traffic.between_nodes_bytes += size
        self._pending = [one for one in self._pending if not one[0].is_completed()]

    def receive(self, action: Action, at: Boundary) -> torch.Tensor:
        """Waits for a micro-batch's tensor: ``(rows, samples, hidden)``, or this rank's share."""
        peers = self._peers(action)
        assert action.peer is not None
        low, high = share(at.rows, self.seat.tp, self.seat.tp_rank)
        mine = torch.empty((high - low, at.samples, at.hidden), dtype=at.dtype, device=at.device)
        tag = _tag(action, action.peer)
        parts = [
            (self._number(peers[piece.sender]), mine[piece.low - low : piece.high - low])
            for piece in pieces(at.rows, len(peers), self.seat.tp)
            if piece.receiver == self.seat.tp_rank
        ]
        for wait in [dist.irecv(part, peer, tag=tag) for peer, part in parts]:
            assert wait is not None, "every rank is a member of the default group"
            wait.wait()
        if self.stamps is not None:
            for peer, _ in parts:
                self.stamps.arrived(self.plan, self.seat.chunks[action.chunk], action, peer, tag)
        if self.sequence_parallel or self.seat.tp == 1:
            return mine
        return self._gathered(mine, at)

    def finish(self, look: Callable[[], object] = bool) -> None:
        """Waits until everything that was sent has left.

        Args:
            look: Called from time to time while messages are held back; may raise.
        """
        if self._outbox is not None:
            self._pending += self._outbox.finish(look)
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def close(self) -> None:
        """Forgets what is still held back, if the pass was broken off."""
        if self._outbox is not None:
            self._outbox.close()

    def _post(self, rows: torch.Tensor, peer: int, tag: int) -> None:
        hold = None if self.holds is None else self.holds(peer)
        if hold is None:
            work = dist.isend(rows, self._number(peer), tag=tag)
            self._pending.append((work, rows))
            return
        if self._outbox is None:
            self._outbox = Outbox()
        self._outbox.put(rows, self._number(peer), tag, hold)

    def _number(self, rank: int) -> int:
        return self.pool.world.number(rank)

    def _peers(self, action: Action) -> tuple[int, ...]:
        assert action.peer is not None
        return self.plan.stage(action.peer).ranks

    def _gathered(self, mine: torch.Tensor, at: Boundary) -> torch.Tensor:
        """All rows, from the shares of the tensor-parallel group, padded to the largest."""
        degree = self.seat.tp
        spans = [share(at.rows, degree, tp_rank) for tp_rank in range(degree)]
        most = max(high - low for low, high in spans)
        if len(mine) < most:
            mine = torch.cat([mine, mine.new_zeros(most - len(mine), *mine.shape[1:])])
        whole = mine.new_empty((most * degree, *mine.shape[1:]))
        dist.all_gather_into_tensor(whole, mine, group=self.pool[self.seat.members])
        if most * degree == at.rows:
            return whole
        parts = [whole[k * most : k * most + b - a] for k, (a, b) in enumerate(spans)]
        return torch.cat(parts)


def _tag(action: Action, sender: Instance) -> int:
    """Tells apart what two ranks may send each other in one step.

    The sender's stage does: a rank can hold several, and the same micro-batch passes each once in
    either direction.
    """
    forward = action.kind in (Kind.SEND_FORWARD, Kind.RECV_FORWARD)
    return (action.micro_batch * 512 + sender.stage) * 2 + forward
