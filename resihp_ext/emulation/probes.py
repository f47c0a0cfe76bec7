"""What the micro-benchmarks of a validation take on the devices that are emulated.

Their sizes are such that each takes a few milliseconds on a healthy device, whatever the scale of
time: long enough to be slept exactly, short enough for a boundary between two steps.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.cost.layer_cost import Part, TensorGroup
from resihp_ext.cost.link import Link
from resihp_ext.emulation.scene import Scene

LASTS_S = 0.003
"""About what one repetition takes on a healthy device, as it passes in this job."""


class ProbePrices:
    """Seconds of one repetition on healthy devices and links, as they pass in this job."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        large_s = LASTS_S / scene.time_scale
        shape, cost = scene.shape, scene.cost
        token_s = cost.layers.layer(shape, TensorGroup(tp=1, link=cost.inside), Part.FORWARD)
        tokens = max(1, round(large_s / token_s.alpha_s))
        self.gemm_s = tokens * token_s.alpha_s * scene.time_scale
        """The linear part of a layer's forward, over as many tokens as fit into the time."""

    def message_s(self, *, across: bool) -> float:
        """A message, one way."""
        return self._scaled(self._link(across).message_s(self._size_bytes(across)))

    def all_reduce_s(self, ranks: int, *, across: bool) -> float:
        """A ring over so many ranks, of which each step moves a part of such a message."""
        size_bytes = self._size_bytes(across) / 2
        return self._scaled(self._link(across).all_reduce_s(size_bytes, ranks))

    def _size_bytes(self, across: bool) -> float:
        link = self._link(across)
        large_s = LASTS_S / self._scene.time_scale - link.latency_s
        return max(1.0, large_s * link.bytes_per_s)

    def _link(self, across: bool) -> Link:
        return self._scene.cost.between if across else self._scene.cost.inside

    def _scaled(self, seconds: float) -> float:
        return seconds * self._scene.time_scale
