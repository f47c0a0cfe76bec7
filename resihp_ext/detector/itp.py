"""The time of an iteration (ITP): the longest path through the program, at predicted costs.

The graph is laid out once for a plan, in levels of actions that do not depend on each other, so
that an iteration is a few operations on arrays for each level.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import numpy as np

from resihp_ext.detector.slots import Array, Ints, Slots
from resihp_ext.plan.action import RECEIVES, SENDS, Kind
from resihp_ext.plan.plan import Instance


class Walk:
    """The graph of one plan: a node for each action of a host before SYNC."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._names: dict[tuple[Instance, int], int] = {}
        self._before: list[int] = []
        self._sender: list[int] = []
        members: list[list[int]] = []
        self._read(members)
        self._counts = np.array([len(m) for m in members])
        self._members: Ints = np.array([s for m in members for s in m], dtype=np.int64)
        self._first = np.concatenate(([0], np.cumsum(self._counts)[:-1])).astype(np.int64)
        self.first_slot: Ints = self._members[self._first]
        self._levels = self._in_levels()

    def _read(self, members: list[list[int]]) -> None:
        plan, program = self.slots.plan, self.slots.program
        sent = {
            program.message(host, a): (host, i)
            for host, actions in program.lists
            for i, a in enumerate(actions)
            if a.kind in SENDS
        }
        pending: list[tuple[int, tuple[Instance, int]]] = []
        for host, actions in program.lists:
            last = -1
            for i, a in enumerate(actions):
                if a.kind in (Kind.SYNC, Kind.STEP):
                    continue
                node = self._names[host, i] = len(members)
                key = (a.kind, a.micro_batch, a.chunk)
                members.append([self.slots.slot(rank, key) for rank in plan.stage(host).ranks])
                self._before.append(last)
                self._sender.append(-1)
                if a.kind in RECEIVES:
                    pending.append((node, sent[program.message(host, a)]))
                last = node
        for node, name in pending:
            self._sender[node] = self._names[name]
        self.receives: Ints = np.array([node for node, _ in pending], dtype=np.int64)

    def _in_levels(self) -> list[tuple[Ints, Ints, Ints]]:
        """Nodes, their predecessors and senders, level by level; node -1 is before everything."""
        depth = [-1] * len(self._before)
        stack = list(range(len(depth)))
        while stack:
            node = stack[-1]
            needs = [n for n in (self._before[node], self._sender[node]) if n >= 0]
            open_ = [n for n in needs if depth[n] < 0]
            if open_:
                stack += open_
                continue
            depth[node] = 1 + max((depth[n] for n in needs), default=-1)
            stack.pop()
        before, sender = np.array(self._before), np.array(self._sender)
        order = np.array(depth)
        levels = (np.flatnonzero(order == level) for level in range(order.max(initial=-1) + 1))
        return [(nodes, before[nodes], sender[nodes]) for nodes in levels]

    def slowest(self, of_slots: Array) -> Array:
        """Over the members of each node, the largest."""
        return np.asarray(np.maximum.reduceat(of_slots[self._members], self._first))

    def least(self, of_slots: Array) -> Array:
        """Over the members of each node, the smallest."""
        return np.asarray(np.minimum.reduceat(of_slots[self._members], self._first))

    def seconds(self, busy_s: Array, wire_s: Array) -> float:
        """Until the last node ends.

        Args:
            busy_s: How long each node keeps its host.
            wire_s: For receives, how long its message is under way.
        """
        ends = np.zeros(len(busy_s) + 1)
        for nodes, before, sender in self._levels:
            ready = np.maximum(ends[before], ends[sender] + wire_s[nodes])
            ends[nodes] = ready + busy_s[nodes]
        return float(ends.max())
