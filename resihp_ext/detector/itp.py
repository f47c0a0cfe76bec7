"""The time of an iteration (ITP): the longest path through the program, at predicted costs.

The graph is laid out once for a plan. Sends take no time, and a receive is joined to the
computation that follows it; what is left is put in levels of steps that do not depend on each
other, numbered level by level, so that an iteration is a few operations on arrays for each level.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from resihp_ext.detector.slots import Array, Ints
from resihp_ext.plan.action import COMPUTE, RECEIVES, SENDS, Kind
from resihp_ext.plan.plan import Instance
from resihp_ext.plan.program import Program

NONE = -1
Name = tuple[Instance, int]
"""An action by its host and its place in the host's program."""


class Walk:
    """The graph of one program: steps of hosts before SYNC."""

    def __init__(self, program: Program, first_node: Mapping[Instance, int]) -> None:
        """Lays out a program.

        Args:
            first_node: The number of the first action of each host; the others follow.
        """
        self._program, self._first_node = program, first_node
        self.hosts = tuple(host for host, _ in program.lists)
        self._rows: list[tuple[int, int, int, int]] = []
        """Of each step: the one before it on its host, the computing node, the receiving node, and
        the number of its host."""
        self._ends: dict[Name, int] = {}
        """After which step a send leaves; -1: before all of its host."""
        self._sender: dict[int, Name] = {}
        """Whose message a step waits for."""
        self._last: list[int] = []
        """The last step of each host."""
        self._read()
        order, levels = self._in_levels()
        rows = np.array(self._rows, dtype=np.int64).reshape(-1, 4)
        host_of = {host: number for number, host in enumerate(self.hosts)}
        # Every host begins with a place of its own; steps follow in the order of their levels.
        place: Ints = np.zeros(len(order), dtype=np.int64)
        place[order] = np.arange(len(order)) + len(self.hosts)
        before = np.where(rows[:, 0] == NONE, rows[:, 3], place[rows[:, 0]]) if len(rows) else place
        sender = before.copy()
        for step, (host, at) in self._sender.items():
            end = self._ends[host, at]
            sender[step] = host_of[host] if end == NONE else place[end]
        before, sender, rows = before[order], sender[order], rows[order]
        self.work: Ints = rows[:, 1]
        """Nodes that compute, of each step; -1 where a step only waits."""
        self.receive: Ints = rows[:, 2]
        """Nodes that receive; -1 where a step waits for no message."""
        self._levels = [(slice(a, b), before[a:b], sender[a:b]) for a, b in levels]
        self._lasts: Ints = np.array(
            [h if last == NONE else place[last] for h, last in enumerate(self._last)],
            dtype=np.int64,
        )

    def _read(self) -> None:
        program = self._program
        sent = {
            program.message(host, a): (host, i)
            for host, actions in program.lists
            for i, a in enumerate(actions)
            if a.kind in SENDS
        }
        for number, (host, actions) in enumerate(program.lists):
            last, waiting = NONE, NONE
            first = self._first_node[host]
            for i, a in enumerate(actions):
                if waiting != NONE and a.kind not in COMPUTE:
                    last = self._add(last, NONE, waiting, number)
                    waiting = NONE
                if a.kind in (Kind.SYNC, Kind.STEP):
                    continue
                if a.kind in RECEIVES:
                    waiting = first + i
                    self._sender[len(self._rows)] = sent[program.message(host, a)]
                elif a.kind in SENDS:
                    self._ends[host, i] = last
                else:
                    last = self._add(last, first + i, waiting, number)
                    waiting = NONE
            if waiting != NONE:
                last = self._add(last, NONE, waiting, number)
            self._last.append(last)

    def _add(self, before: int, work: int, receive: int, host: int) -> int:
        self._rows.append((before, work, receive, host))
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

    def ends_s(self, busy_s: Array, wire_s: Array, begin_s: Array | float = 0.0) -> Array:
        """When the last step of each host ends; many iterations at once along further axes.

        Args:
            busy_s: How long each step keeps its host: shape (steps, ...).
            wire_s: How long the message is under way that it waits for, 0 for none; shape (steps,)
                or as ``busy_s``.
            begin_s: When each host begins: shape (hosts, ...), or one moment for all.

        Returns:
            Shape (hosts, ...).
        """
        count, more = len(self.hosts), busy_s.shape[1:]
        wire_s = wire_s.reshape(wire_s.shape + (1,) * (busy_s.ndim - wire_s.ndim))
        ends = np.empty((count + len(busy_s), *more))
        ends[:count] = begin_s
        done = ends[count:]
        for mine, before, sender in self._levels:
            arrived = ends.take(sender, axis=0)
            arrived += wire_s[mine]
            ready = np.maximum(ends.take(before, axis=0), arrived, out=arrived)
            np.add(ready, busy_s[mine], out=done[mine])
        return np.asarray(ends[self._lasts])

    def seconds(self, busy_s: Array, wire_s: Array) -> float:
        """Until the last step of one iteration ends; see :meth:`ends_s`."""
        return float(self.ends_s(busy_s, wire_s).max())
