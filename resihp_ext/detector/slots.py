"""All actions of all ranks of a plan in one row of numbers: what is computed once for each plan.

A slot is an action of a rank. Everything that a step brings is an array over slots, so that a step
of a thousand ranks is a few operations on arrays.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resihp_ext.detector.timed import RankStep
from resihp_ext.plan.action import COMPUTE, RECEIVES, SENDS, Kind
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.program import Message, Program

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
Role = tuple[int, int]
"""Place in :data:`KINDS`, TP degree."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The arrays of one step."""

    start_s: Array
    own_s: Array
    wait_s: Array
    """Of each slot; NaN where nothing was measured."""
    begun_s: Array
    total_s: Array
    """Of each rank."""
    tokens: Array
    squared: Array
    """Of each micro-batch."""


class Slots:
    """Where each action is, and what it computes."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.program = plan, program
        self.ranks = tuple(r for host in plan.hosts for r in plan.stage(host).ranks)
        self.index_of = {rank: i for i, rank in enumerate(self.ranks)}
        self.keys: list[dict[tuple[Kind, int, int], int]] = []
        rows: list[tuple[int, int, int, int, int, bool, bool]] = []
        for host in plan.hosts:
            chunks, actions = plan.chunks(host), program.actions(host)
            for _ in plan.stage(host).ranks:
                keys = {}
                for action in actions:
                    stage = plan.stage(chunks[action.chunk])
                    kind = KINDS.index(action.kind) if action.kind in COMPUTE else -1
                    keys[action.kind, action.micro_batch, action.chunk] = len(rows)
                    ends = (stage.layers[0] == 0, stage.layers[1] == plan.num_layers)
                    place = (len(self.keys), kind, action.micro_batch)
                    rows.append((*place, stage.tp, stage.depth, *ends))
                self.keys.append(keys)
        table = np.array(rows, dtype=np.int64)
        self.size = len(rows)
        self.rank_of, kinds, self.micro_batch = table[:, 0], table[:, 1], table[:, 2]
        self.compute: Ints = np.flatnonzero(kinds >= 0)
        self.roles: dict[Role, Ints] = {}
        for kind, tp in sorted({(k, t) for k, t in zip(kinds, table[:, 3], strict=True) if k >= 0}):
            mine = np.flatnonzero((kinds == kind) & (table[:, 3] == tp))
            self.roles[int(kind), int(tp)] = mine
        self._shape = table[:, 4:].astype(float)
        self.hops = self._hops()
        """Pieces of messages: ranks, whether forward, slots of the send and of the receive."""

    def _hops(self) -> list[tuple[tuple[int, int], bool, int, int]]:
        """For each piece of each message: the two ranks, whether forward, slots of both ends."""
        sent: dict[Message, tuple[tuple[int, ...], Kind, int, int]] = {}
        plan, hops = self.plan, []
        for host, actions in self.program.lists:
            for a in actions:
                if a.kind in SENDS:
                    where = (plan.stage(host).ranks, a.kind, a.micro_batch, a.chunk)
                    sent[self.program.message(host, a)] = where
        for host, actions in self.program.lists:
            there = plan.stage(host).ranks
            for a in (a for a in actions if a.kind in RECEIVES):
                here, kind, number, chunk = sent[self.program.message(host, a)]
                for i, j in overlaps(len(here), len(there)):
                    send = self.slot(here[i], (kind, number, chunk))
                    receive = self.slot(there[j], (a.kind, number, a.chunk))
                    forward = a.kind is Kind.RECV_FORWARD
                    ends = (here[i], there[j]) if forward else (there[j], here[i])
                    hops.append((ends, forward, send, receive))
        return hops

    def slot(self, rank: int, key: tuple[Kind, int, int]) -> int:
        """Where an action of a rank is."""
        return self.keys[self.index_of[rank]][key]

    def features(self, slots: Ints, sample: Sample) -> Array:
        """What the time of computation is linear in: layers times tokens, layers times squares,
        tokens through the embedding, tokens through the head."""
        micro_batch, shape = self.micro_batch[slots], self._shape[slots]
        tokens, squared = sample.tokens[micro_batch], sample.squared[micro_batch]
        columns = (shape[:, 0] * tokens, shape[:, 0] * squared)
        return np.stack((*columns, shape[:, 1] * tokens, shape[:, 2] * tokens), axis=1)

    def read(self, steps: Mapping[int, RankStep]) -> Sample:
        """Records of a step as arrays; ranks and actions that the plan does not have are left."""
        times = np.full((3, self.size), np.nan)
        begun, total = np.full((2, len(self.ranks)), np.nan)
        work = np.full((2, self.plan.micro_batches), np.nan)
        for rank, step in steps.items():
            i = self.index_of.get(rank)
            if i is None:
                continue
            begun[i], total[i] = step.begun_s, step.total_s
            keys = self.keys[i]
            for batch in step.micro_batches:
                if 0 <= batch.number < self.plan.micro_batches:
                    work[:, batch.number] = batch.tokens, batch.squared
            read = [
                (slot, a.start_s, a.own_s, a.wait_s)
                for a in step.actions
                if (slot := keys.get((a.kind, a.micro_batch, a.chunk))) is not None
            ]
            if read:
                slots, *columns = zip(*read, strict=True)
                times[:, list(slots)] = columns
        return Sample(
            start_s=times[0],
            own_s=times[1],
            wait_s=times[2],
            begun_s=begun,
            total_s=total,
            tokens=work[0],
            squared=work[1],
        )


def overlaps(senders: int, receivers: int) -> list[tuple[int, int]]:
    """Which equal shares of the sender and of the receiver have something in common."""
    return [
        (i, j)
        for i in range(senders)
        for j in range(receivers)
        if i * receivers < (j + 1) * senders and j * senders < (i + 1) * receivers
    ]
