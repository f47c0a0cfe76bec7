"""Patch: tell apart own work and waits for partners inside a forward or backward action.

Symbol: the collectives of ``torch.distributed`` that Megatron's layers call by name, and the names
``dist_all_gather_func`` and ``dist_reduce_scatter_func`` to which its tensor-parallel modules bind
two of them.
Versions: megatron-core 0.19.x, on every device; while nobody times an action torch's own run.
Reason: a slow rank of a tensor-parallel group makes all its partners look slow, unless their waits
are counted apart. Inside these actions every collective is one with such partners.
Delete when: upstream tells a callback of its collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch.distributed as dist

from megatron.resilience.patches.base import Patch, signature_drift, upstream_module

_MODULES = "megatron.core.tensor_parallel"
_BOUND = {
    "mappings": ("dist_all_gather_func", "dist_reduce_scatter_func"),
    "layers": ("dist_all_gather_func", "dist_reduce_scatter_func"),
    "utils": ("dist_all_gather_func",),
}
"""Names that are bound when a module is imported."""
_BY_NAME = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all_single",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_tensor",
)
"""Looked up in ``torch.distributed`` at each call."""


class WaitClock(Protocol):
    """What the patch needs of a clock."""

    @property
    def computing(self) -> bool: ...

    def wait_begins(self) -> None: ...

    def wait_ends(self) -> None: ...


class PartnerWaits(Patch):
    """Tells ``clock``, when there is one, of every wait for partners."""

    symbol = "torch.distributed collectives, as tensor-parallel layers call them"
    reason = "waits for partners are told from own work"
    delete_when = "upstream tells a callback of its collectives"
    devices = frozenset({"cpu", "cuda"})

    def __init__(self) -> None:
        super().__init__()
        self.clock: WaitClock | None = None

    def drift(self) -> str | None:
        for name, symbols in _BOUND.items():
            module = upstream_module(f"{_MODULES}.{name}")
            missing = [symbol for symbol in symbols if not hasattr(module, symbol)]
            if missing:
                return f"{module.__name__} has no {missing}"
        return signature_drift(dist.all_reduce, "tensor, op, group, async_op")

    def install(self) -> None:
        for name, symbols in _BOUND.items():
            module = upstream_module(f"{_MODULES}.{name}")
            for symbol in symbols:
                self.replace(module, symbol, self._timed(getattr(module, symbol)))
        for symbol in _BY_NAME:
            self.replace(dist, symbol, self._timed(getattr(dist, symbol)))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def collective(*args: Any, **kwargs: Any) -> Any:
            clock = self.clock
            if clock is None or not clock.computing or _alone(kwargs.get("group")):
                return original(*args, **kwargs)
            if kwargs.get("async_op"):
                work = original(*args, **kwargs)
                return work if work is None else _TimedWork(work, clock)
            clock.wait_begins()
            try:
                return original(*args, **kwargs)
            finally:
                clock.wait_ends()

        return collective


def _alone(group: Any) -> bool:
    """Whether there are no partners; upstream gives the group by name."""
    return group is not None and group.size() == 1


class _TimedWork:
    """A collective under way, whose ``wait`` counts as a wait."""

    def __init__(self, work: Any, clock: WaitClock) -> None:
        self._work, self._clock = work, clock

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        if not self._clock.computing:
            return self._work.wait(*args, **kwargs)
        self._clock.wait_begins()
        try:
            return self._work.wait(*args, **kwargs)
        finally:
            self._clock.wait_ends()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
