"""What of an iteration is not computation is measured as well: transfers, collectives inside a
tensor-parallel group, and everything from SYNC on; together with MTP and the walk, the iteration.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import defaultdict, deque
from statistics import median

import numpy as np

from resihp_ext.detector.itp import Walk
from resihp_ext.detector.slots import Array, Role, Sample, Slots, finite_median
from resihp_ext.detector.transfers import Transfers
from resihp_ext.plan.action import Kind

REMEMBERED = 40
"""Steps over which medians are taken."""
Recent = deque[float]


def _recent() -> Recent:
    return deque(maxlen=REMEMBERED)


class IterationPredictor:
    """The walk of the present plan, and costs that are carried from plan to plan."""

    def __init__(self, slots: Slots) -> None:
        self._group: dict[Role, Recent] = defaultdict(_recent)
        self._wires: dict[tuple[int, int], float] = {}
        self._tail, self._offset = _recent(), _recent()
        self.adopt(slots)

    def adopt(self, slots: Slots) -> None:
        """Lays out another plan."""
        old = getattr(self, "_slots", None)
        if old is not None:
            grown = _share(slots) / _share(old)
            self._tail = deque((t * grown for t in self._tail), maxlen=REMEMBERED)
        self._slots, self._walk = slots, Walk(slots.program, slots.first_node)
        self._node_of = {d.rank: d.node for d in slots.plan.devices}
        work, receive = self._walk.work, self._walk.receive
        self._busy = np.flatnonzero(work >= 0)
        self._nodes_of_busy = work[self._busy]
        self._host = slots.host_of_node[self._nodes_of_busy]
        self._steps = {
            role: np.flatnonzero(np.isin(work, nodes)) for role, nodes in slots.roles.items()
        }
        pieces: dict[int, set[tuple[int, int]]] = defaultdict(set)
        for pair, _, _, slot in slots.hops:
            pieces[int(slots.node_of[slot])].add(pair)
        self._pieces = {
            int(step): sorted(pieces[int(receive[step])]) for step in np.flatnonzero(receive >= 0)
        }
        compute = slots.compute[np.argsort(slots.node_of[slots.compute], kind="stable")]
        self._members = compute
        self._nodes, self._first = np.unique(slots.node_of[compute], return_index=True)
        ends = [k not in (Kind.SYNC, Kind.STEP) for keys in slots.keys.values() for k, _, _ in keys]
        self._pipeline = np.flatnonzero(np.array(ends)[slots.node_of])
        self._levels_s: Array | None = None
        self._wire_s = self._wires_of_steps()

    def learn(self, sample: Sample, transfers: Transfers, levels_s: Array) -> None:
        """Takes a healthy step; ``levels_s`` are the healthy times of the transfers' pairs."""
        waits = np.full(self._slots.nodes, np.nan)
        waits[self._nodes] = np.minimum.reduceat(sample.wait_s.take(self._members), self._first)
        for role, nodes in self._slots.roles.items():
            with np.errstate(all="ignore"):
                value = finite_median(waits[nodes] / self._slots.load(nodes, sample))
            if np.isfinite(value):
                self._group[role].append(value)
        if levels_s is not self._levels_s:
            self._levels_s = levels_s
            known = zip(transfers.pairs, levels_s.tolist(), strict=True)
            self._wires |= {pair: seconds for pair, seconds in known if np.isfinite(seconds)}
            self._wire_s = self._wires_of_steps()
        end_s = (sample.start_s + sample.own_s + sample.wait_s)[self._pipeline]
        tail = finite_median(sample.total_s) - float(np.fmax.reduce(end_s))
        if np.isfinite(tail):
            self._tail.append(max(tail, 0.0))

    def correct(self, ratio: float) -> None:
        """Takes a healthy step's ratio: noise makes the longest of many paths longer."""
        if np.isfinite(ratio):
            self._offset.append(ratio * self.offset)

    @property
    def offset(self) -> float:
        """By how much healthy iterations last longer than the walk."""
        return min(max(median(self._offset), 0.9), 1.15) if self._offset else 1.0

    def predict_s(self, node_s: Array, level: Array, sample: Sample) -> float:
        """An iteration.

        Args:
            node_s: Each node's own time on a healthy device.
            level: How many times as long each rank's device is known to take.
        """
        busy = np.zeros(len(self._walk.work))
        # A group is as slow as its slowest member.
        slow = self._slots.most_of_hosts(level)
        busy[self._busy] = np.nan_to_num(node_s.take(self._nodes_of_busy)) * slow.take(self._host)
        for role, steps in self._steps.items():
            if group_s := self._group_s(role):
                busy[steps] += group_s * self._slots.load(self._walk.work[steps], sample)
        walk_s = self._walk.seconds(busy, self._wire_s)
        tail_s = median(self._tail) if self._tail else 0.0
        return (walk_s + tail_s) * self.offset

    def _group_s(self, role: Role) -> float:
        """What TP groups do together, for a layer and a token; of another degree, as rings do."""
        if self._group[role]:
            return median(self._group[role])
        kind, tp = role
        known = [t for (k, t), seconds in self._group.items() if k == kind and t > 1 and seconds]
        if tp == 1 or not known:
            return 0.0
        near = min(known, key=lambda t: abs(t - tp))
        return median(self._group[kind, near]) * (1 - 1 / tp) / (1 - 1 / near)

    def _wires_of_steps(self) -> Array:
        near: dict[bool, list[float]] = {True: [], False: []}
        for pair, seconds in self._wires.items():
            near[self._near(pair)].append(seconds)
        usual = {k: median(v) if v else 0.0 for k, v in near.items()}
        wires = np.zeros(len(self._walk.work))
        for step, pieces in self._pieces.items():
            wires[step] = max(self._wires.get(p, usual[self._near(p)]) for p in pieces)
        return wires

    def _near(self, pair: tuple[int, int]) -> bool:
        return self._node_of.get(pair[0]) == self._node_of.get(pair[1])


def _share(slots: Slots) -> float:
    """Layers that the fullest rank holds: SYNC and STEP grow with them."""
    plan = slots.plan
    return max(
        sum(plan.stage(c).depth / plan.stage(c).tp for c in plan.chunks(h)) for h in plan.hosts
    )
