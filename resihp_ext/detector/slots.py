"""All actions of all ranks of a plan in one row of numbers: what is computed once for each plan.

A slot is an action of a rank, a node is an action of a host: of all ranks of a TP group together,
which do the same work. Everything that a step brings is an array over slots or nodes, so that a
step of a thousand ranks is a few operations on arrays.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resihp_ext.detector.timed import Key, keys_of
from resihp_ext.plan.action import COMPUTE, RECEIVES, SENDS, Kind
from resihp_ext.plan.plan import Instance, Plan
from resihp_ext.plan.program import Message, Program

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
Role = tuple[int, int]
"""Place in :data:`KINDS`, TP degree."""
Hop = tuple[tuple[int, int], bool, int, int]
"""A piece of a message: its two ranks, whether forward, slots of the send and of the receive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The arrays of one step."""

    start_s: Array
    own_s: Array
    wait_s: Array
    """Of each slot; NaN where nothing was measured."""
    total_s: Array
    begun_s: Array
    """Of each rank; NaN where nothing was measured."""
    tokens: Array
    squared: Array
    """Of each micro-batch."""


class Slots:
    """Where each action is, and what it computes."""

    def __init__(self, plan: Plan, program: Program) -> None:
        self.plan, self.program = plan, program
        self.ranks = tuple(r for host in plan.hosts for r in plan.stage(host).ranks)
        self.index_of = {rank: i for i, rank in enumerate(self.ranks)}
        self.keys = {host: keys_of(actions) for host, actions in program.lists}
        self._place = {h: {key: j for j, key in enumerate(keys)} for h, keys in self.keys.items()}
        self._lay_out()
        self.compute: Ints = np.flatnonzero(self._kind[self.node_of] >= 0)
        """Slots that compute."""
        self.compute_node: Ints = self.node_of[self.compute]
        # A rank's slots are in one piece, and so are those of them that compute.
        owners = self.rank_of[self.compute]
        self._working, self._first_compute = np.unique(owners, return_index=True)
        self.roles: dict[Role, Ints] = {}
        """Nodes that compute, by role."""
        self.role_slots: dict[Role, Ints] = {}
        named = {(int(k), int(t)) for k, t in zip(self._kind, self._tp, strict=True) if k >= 0}
        for kind, tp in sorted(named):
            mine = (self._kind == kind) & (self._tp == tp)
            self.roles[kind, tp] = np.flatnonzero(mine)
            self.role_slots[kind, tp] = np.flatnonzero(mine[self.node_of])
        self._of_roles = {
            role: (self.micro_batch[nodes], np.ascontiguousarray(self._shape[nodes].T))
            for role, nodes in self.roles.items()
        }
        self._busy_nodes: Ints = np.flatnonzero(self._kind >= 0)
        busy_hosts = self.host_of_node[self._busy_nodes]
        self._busy_hosts, self._first_busy = np.unique(busy_hosts, return_index=True)
        counts = [plan.stage(host).tp for host in plan.hosts]
        self._host_of_index: Ints = np.repeat(np.arange(len(counts)), counts)
        self.hops: list[Hop] = self._hops()

    def _lay_out(self) -> None:
        plan = self.plan
        rows: list[tuple[int, int, int, int, int, bool, bool]] = []
        nodes_of: list[Ints] = []
        self.host_of_rank: dict[int, Instance] = {}
        self.first_node: dict[Instance, int] = {}
        self.first_slot: list[int] = []
        """Of each rank."""
        size = 0
        for number, host in enumerate(plan.hosts):
            chunks, actions = plan.chunks(host), self.program.actions(host)
            self.first_node[host] = len(rows)
            for action in actions:
                stage = plan.stage(chunks[action.chunk])
                kind = KINDS.index(action.kind) if action.kind in COMPUTE else -1
                ends = (stage.layers[0] == 0, stage.layers[1] == plan.num_layers)
                rows.append((number, kind, action.micro_batch, stage.tp, stage.depth, *ends))
            for rank in plan.stage(host).ranks:
                self.host_of_rank[rank] = host
                self.first_slot.append(size)
                nodes_of.append(self.first_node[host] + np.arange(len(actions)))
                size += len(actions)
        table = np.array(rows, dtype=np.int64)
        self.size, self.nodes = size, len(rows)
        self.host_of_node: Ints = table[:, 0]
        self._kind, self.micro_batch, self._tp = table[:, 1], table[:, 2], table[:, 3]
        self._shape = table[:, 4:].astype(float)
        self.node_of: Ints = np.concatenate(nodes_of)
        lengths = [len(n) for n in nodes_of]
        self.rank_of: Ints = np.repeat(np.arange(len(self.ranks)), lengths)
        counts = [plan.stage(host).tp for host in plan.hosts]
        self._first_rank = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)

    def _hops(self) -> list[Hop]:
        sent: dict[Message, tuple[tuple[int, ...], Key]] = {}
        plan, hops = self.plan, []
        for host, actions in self.program.lists:
            for a in actions:
                if a.kind in SENDS:
                    where = (plan.stage(host).ranks, (a.kind, a.micro_batch, a.chunk))
                    sent[self.program.message(host, a)] = where
        for host, actions in self.program.lists:
            there = plan.stage(host).ranks
            for a in (a for a in actions if a.kind in RECEIVES):
                here, key = sent[self.program.message(host, a)]
                for i, j in overlaps(len(here), len(there)):
                    send = self.slot(here[i], key)
                    receive = self.slot(there[j], (a.kind, a.micro_batch, a.chunk))
                    forward = a.kind is Kind.RECV_FORWARD
                    ends = (here[i], there[j]) if forward else (there[j], here[i])
                    hops.append((ends, forward, send, receive))
        return hops

    def slot(self, rank: int, key: Key) -> int:
        """Where an action of a rank is."""
        place = self._place[self.host_of_rank[rank]][key]
        return self.first_slot[self.index_of[rank]] + place

    def features(self, nodes: Ints, sample: Sample) -> Array:
        """What the time of computation is linear in: layers times tokens, layers times squares,
        tokens through the embedding, tokens through the head."""
        return _features(self.micro_batch[nodes], self._shape.T.take(nodes, axis=1), sample)

    def role_features(self, role: Role, sample: Sample) -> Array:
        """The same of all nodes of a role."""
        return _features(*self._of_roles[role], sample)

    def load(self, nodes: Ints, sample: Sample) -> Array:
        """Layers times tokens."""
        return np.asarray(self._shape[nodes, 0] * sample.tokens[self.micro_batch[nodes]])

    def sums_of_ranks(self, of_compute: Array) -> Array:
        """Over the slots of each rank that compute; 0 where there are none."""
        sums = np.zeros(len(self.ranks))
        sums[self._working] = np.add.reduceat(of_compute, self._first_compute)
        return sums

    def sums_of_nodes(self, of_nodes: Array) -> Array:
        """The same from what all ranks of a node have in common."""
        sums = np.zeros(len(self._first_rank))
        found = of_nodes.take(self._busy_nodes)
        sums[self._busy_hosts] = np.add.reduceat(found, self._first_busy)
        return sums.take(self._host_of_index)

    def most_of_hosts(self, of_ranks: Array) -> Array:
        """Over the ranks of each host, the largest."""
        return np.asarray(np.maximum.reduceat(of_ranks, self._first_rank))


def _features(micro_batch: Ints, shape: Array, sample: Sample) -> Array:
    tokens, squared = sample.tokens.take(micro_batch), sample.squared.take(micro_batch)
    columns = np.empty((4, len(micro_batch)))
    np.multiply(shape[0], tokens, out=columns[0])
    np.multiply(shape[0], squared, out=columns[1])
    np.multiply(shape[1:], tokens, out=columns[2:])
    return columns.T


def finite_median(values: Array) -> float:
    """The median of what is finite; NaN when nothing is."""
    found = values[np.isfinite(values)]
    if not len(found):
        return float("nan")
    low, high = (len(found) - 1) // 2, len(found) // 2
    found.partition((low, high))
    return float((found[low] + found[high]) / 2)


def medians(rows: Array) -> Array:
    """The median of each column's finite values; NaN where there are none."""
    rows = np.sort(np.where(np.isfinite(rows), rows, np.nan), axis=0)
    counts, at = np.isfinite(rows).sum(axis=0), np.arange(rows.shape[1])
    low, high = rows[np.maximum(counts - 1, 0) // 2, at], rows[counts // 2 % len(rows), at]
    return np.where(counts > 0, (low + high) / 2, np.nan)


def overlaps(senders: int, receivers: int) -> list[tuple[int, int]]:
    """Which equal shares of the sender and of the receiver have something in common."""
    return [
        (i, j)
        for i in range(senders)
        for j in range(receivers)
        if i * receivers < (j + 1) * senders and j * senders < (i + 1) * receivers
    ]
