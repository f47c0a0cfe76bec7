"""How long messages of a labelled synthetic run take: the network, its noise, and slow links.

Beside the noise that everything has, messages are delayed by timers and schedulers, seldom and then
for many times the usual (a log-normal delay), and in single steps a link is busy with what others
send (a Pareto-distributed factor). Neither is a fault.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from resihp_ext.cost.cost_model import preset
from resihp_ext.detector.scene import Scene
from resihp_ext.detector.slots import Array

DELAY_SPREAD = 1.2
"""Of the delay's logarithm: one in a hundred is sixteen times the usual one."""
BUSY_SHAPE, BUSY_SCALE = 1.5, 0.3
"""A busy link takes 1 + BUSY_SCALE * (1 + Pareto(BUSY_SHAPE)) times as long."""
Pair = tuple[int, int]


class Wires:
    """The links of one run."""

    def __init__(self, scene: Scene, node_of: Mapping[int, int], numbers: np.random.Generator):
        self._scene, self._node_of, self._numbers = scene, node_of, numbers
        self._model = preset("a100")
        self._slow: dict[Pair, float] = {}
        self._busy: dict[Pair, float] = {}

    def begin(self, step: int) -> None:
        """Another step: which links are slow, and which are busy."""
        self._slow = {}
        for fault in self._scene.faults:
            if fault.kind == "link":
                one, other = fault.ranks
                self._slow[one, other] = fault.at(step)
        self._busy = {}

    def usual_s(self, source: int, rank: int, size_bytes: float) -> float:
        """A message on an idle, healthy link."""
        near = self._node_of[source] == self._node_of[rank]
        link = self._model.inside if near else self._model.between
        return link.message_s(size_bytes) * self._scene.network * self._scene.time_scale

    def factor(self, source: int, rank: int) -> float:
        """How many times as long a message takes because its link is slow."""
        return self._slow.get(_pair(source, rank), 1.0)

    def seconds(self, source: int, rank: int, size_bytes: float, noise: float) -> float:
        """A message."""
        scene = self._scene
        wire_s = self.usual_s(source, rank, size_bytes) * self.factor(source, rank) * noise
        if scene.congestion:
            wire_s *= self._busy_factor(_pair(source, rank))
        if scene.delay_s:
            wire_s += scene.delay_s * float(np.exp(self._numbers.normal(0, DELAY_SPREAD)))
        return wire_s

    def _busy_factor(self, pair: Pair) -> float:
        if pair not in self._busy:
            busy = self._numbers.random() < self._scene.congestion
            more = BUSY_SCALE * (1 + float(self._numbers.pareto(BUSY_SHAPE)))
            self._busy[pair] = 1 + more if busy else 1.0
        return self._busy[pair]


def validated(times: Array, numbers: np.random.Generator, spread: float = 0.01) -> Array:
    """Times as a benchmark on idle devices sees them."""
    return np.asarray(times * np.exp(numbers.normal(0, spread, len(times))))


def _pair(one: int, other: int) -> Pair:
    return min(one, other), max(one, other)
