"""The time of an iteration (ITP): the longest path through the program, at predicted costs.

The graph is laid out once for a plan. Sends take no time, and a receive is joined to the
computation that follows it; what is left is put in levels of steps that do not depend on each
other, numbered level by level, so that an iteration is a few operations on arrays for each level.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from resihp_ext.detector.slots import Array, Ints, Slots
from resihp_ext.plan.action import COMPUTE, RECEIVES, SENDS, Kind
from resihp_ext.plan.plan import Instance

NONE = -1
Name = tuple[Instance, int]
"""An action by its host and its place in the host's program."""


class Walk:
    """The graph of one plan: steps of hosts before SYNC."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._rows: list[tuple[int, int, int]] = []
        """Of each step: the one before it on its host, the computing node, the receiving node."""
        self._ends: dict[Name, int] = {}
        """After which step a send leaves."""
        self._sender: dict[int, Name] = {}
        """Whose message a step waits for."""
        self._read()
        order, levels = self._in_levels()
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 3)[order]
        self.work: Ints = rows[:, 1]
        """Nodes that compute, of each step; -1 where a step only waits."""
        self.receive: Ints = rows[:, 2]
        """Nodes that receive; -1 where a step waits for no message."""
        # Step 0 is before everything: the others are numbered from 1.
        place = np.zeros(len(order) + 1, dtype=np.int64)
        place[order] = np.arange(1, len(order) + 1)
        before = place[rows[:, 0]]
        names = [self._sender.get(int(step)) for step in order]
        sender = place[[NONE if name is None else self._ends[name] for name in names]]
        self._levels = [(slice(a, b), before[a:b], sender[a:b]) for a, b in levels]

    def _read(self) -> None:
        program = self._slots.program
        sent = {
            program.message(host, a): (host, i)
            for host, actions in program.lists
            for i, a in enumerate(actions)
            if a.kind in SENDS
        }
        for host, actions in program.lists:
            last, waiting = NONE, NONE
            first = self._slots.first_node[host]
            for i, a in enumerate(actions):
                if waiting != NONE and a.kind not in COMPUTE:
                    last = self._add(last, NONE, waiting)
                    waiting = NONE
                if a.kind in (Kind.SYNC, Kind.STEP):
                    continue
                if a.kind in RECEIVES:
                    waiting = first + i
                    self._sender[len(self._rows)] = sent[program.message(host, a)]
                elif a.kind in SENDS:
                    self._ends[host, i] = last
                else:
                    last = self._add(last, first + i, waiting)
                    waiting = NONE
            if waiting != NONE:
                self._add(last, NONE, waiting)

    def _add(self, before: int, work: int, receive: int) -> int:
        self._rows.append((before, work, receive))
        return len(self._rows) - 1

    def _in_levels(self) -> tuple[Ints, list[tuple[int, int]]]:
        """Steps in the order of their levels, and where each level begins and ends."""
        depth = [NONE] * len(self._rows)
        needs = [[row[0]] for row in self._rows]
        for step, name in self._sender.items():
            needs[step].append(self._ends[name])
        stack = list(range(len(depth)))
        while stack:
            step = stack[-1]
            open_ = [n for n in needs[step] if n != NONE and depth[n] == NONE]
            if open_:
                stack += open_
                continue
            depth[step] = 1 + max((depth[n] for n in needs[step] if n != NONE), default=NONE)
            stack.pop()
        levels = np.array(depth, dtype=np.int64)
        edges = np.concatenate(([0], np.cumsum(np.bincount(levels)))).tolist()
        order: Ints = np.argsort(levels, kind="stable")
        return order, list(pairwise(edges))

    def seconds(self, busy_s: Array, wire_s: Array) -> float:
        """Until the last step ends.

        Args:
            busy_s: How long each step keeps its host.
            wire_s: How long the message is under way that it waits for; 0 for none.
        """
        ends = np.zeros(len(busy_s) + 1)
        done = ends[1:]
        for mine, before, sender in self._levels:
            ready = np.maximum(ends[before], ends[sender] + wire_s[mine])
            done[mine] = ready + busy_s[mine]
        return float(ends.max())
