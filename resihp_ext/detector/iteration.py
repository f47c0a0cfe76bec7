"""What of an iteration is not computation is measured as well: transfers, collectives inside a
tensor-parallel group, and everything from SYNC on; together with MTP and the walk, the iteration.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from resihp_ext.detector.itp import Walk
from resihp_ext.detector.slots import Array, Role, Sample, Slots
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
        self._slots, self._walk = slots, Walk(slots)
        self._node_of = {d.rank: d.node for d in slots.plan.devices}
        role_of_slot: dict[int, Role] = {
            s: role for role, mine in slots.roles.items() for s in mine
        }
        self._roles: dict[Role, list[int]] = defaultdict(list)
        for node, slot in enumerate(self._walk.first_slot):
            if (role := role_of_slot.get(int(slot))) is not None:
                self._roles[role].append(node)
        self._pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for pair, _, _, receive in slots.hops:
            self._pieces[receive].append(pair)
        ending = [
            s
            for keys in slots.keys
            for (kind, _, _), s in keys.items()
            if kind not in (Kind.SYNC, Kind.STEP)
        ]
        self._pipeline = np.array(ending, dtype=np.int64)
        self._wire_s = self._wires_of_nodes()

    def learn(self, sample: Sample, transfers: Transfers, levels_s: Array) -> None:
        """Takes a healthy step; ``levels_s`` are the healthy times of the transfers' pairs."""
        waits = self._walk.least(sample.wait_s)
        load = self._load(sample)
        for role, nodes in self._roles.items():
            with np.errstate(all="ignore"):
                value = float(np.nanmedian(waits[nodes] / load[nodes]))
            if np.isfinite(value):
                self._group[role].append(value)
        fresh = {p: s for p, s in zip(transfers.pairs, levels_s, strict=True) if np.isfinite(s)}
        if fresh != self._wires:
            self._wires |= fresh
            self._wire_s = self._wires_of_nodes()
        end_s = (sample.start_s + sample.own_s + sample.wait_s)[self._pipeline]
        tail = float(np.nanmedian(sample.total_s) - np.nanmax(end_s))
        if np.isfinite(tail):
            self._tail.append(max(tail, 0.0))

    def correct(self, ratio: float) -> None:
        """Takes a healthy step's ratio: noise makes the longest of many paths longer."""
        if np.isfinite(ratio):
            self._offset.append(ratio * self.offset)

    @property
    def offset(self) -> float:
        """By how much healthy iterations last longer than the walk."""
        return float(np.clip(np.median(self._offset), 0.9, 1.15)) if self._offset else 1.0

    def predict_s(self, own_s: Array, sample: Sample) -> float:
        """An iteration, given each slot's own time on its device as it is known to be."""
        busy = np.nan_to_num(self._walk.slowest(own_s))
        load = self._load(sample)
        for role, nodes in self._roles.items():
            busy[nodes] += self._group_s(role) * load[nodes]
        walk_s = self._walk.seconds(busy, self._wire_s)
        tail_s = float(np.median(self._tail)) if self._tail else 0.0
        return (walk_s + tail_s) * self.offset

    def _group_s(self, role: Role) -> float:
        """What TP groups do together, for a layer and a token; of another degree, as rings do."""
        if self._group[role]:
            return float(np.median(self._group[role]))
        kind, tp = role
        known = [t for (k, t), seconds in self._group.items() if k == kind and t > 1 and seconds]
        if tp == 1 or not known:
            return 0.0
        near = min(known, key=lambda t: abs(t - tp))
        return float(np.median(self._group[kind, near])) * (1 - 1 / tp) / (1 - 1 / near)

    def _load(self, sample: Sample) -> Array:
        features = self._slots.features(self._walk.first_slot, sample)
        return features[:, 0]

    def _wires_of_nodes(self) -> Array:
        near: dict[bool, list[float]] = {True: [], False: []}
        for pair, seconds in self._wires.items():
            near[self._near(pair)].append(seconds)
        usual = {k: float(np.median(v)) if v else 0.0 for k, v in near.items()}
        wires = np.zeros(len(self._walk.first_slot))
        for node in self._walk.receives:
            pieces = self._pieces[int(self._walk.first_slot[node])]
            wires[node] = max(self._wires.get(p, usual[self._near(p)]) for p in pieces)
        return wires

    def _near(self, pair: tuple[int, int]) -> bool:
        return self._node_of.get(pair[0]) == self._node_of.get(pair[1])


def _share(slots: Slots) -> float:
    """Layers that the fullest rank holds: SYNC and STEP grow with them."""
    plan = slots.plan
    return max(
        sum(plan.stage(c).depth / plan.stage(c).tp for c in plan.chunks(h)) for h in plan.hosts
    )
