"""Patch: let Megatron's timers measure without meeting other ranks.

Symbol: ``start`` and ``stop`` of ``megatron.core.timers.Timer``, and
``Timers._get_elapsed_time_all_ranks``.
Versions: megatron-core 0.19.x, on every device; without an executor, upstream's own are called.
Reason: a barrier or a gather for the sake of a log line is one more place where a dead rank hangs
all others, and no rank of an uneven layout does the same work as another.
Delete when: timers take a group, or no group, for all they do.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.resilience.patches.base import Patch, signature_drift, upstream_module

_MODULE = "megatron.core.timers"


class LocalTimers(Patch):
    """Takes this rank's times alone, when ``local`` is set."""

    symbol = f"{_MODULE} barriers and gathers"
    reason = "no collective for a log line"
    delete_when = "timers take a group for all they do"
    devices = frozenset({"cpu", "cuda"})

    def __init__(self) -> None:
        super().__init__()
        self.local = False

    def drift(self) -> str | None:
        module = upstream_module(_MODULE)
        return (
            signature_drift(module.Timer.start, "self, barrier")
            or signature_drift(module.Timer.stop, "self, barrier")
            or signature_drift(module.Timer.elapsed, "self, reset, barrier")
            or signature_drift(
                module.Timers._get_elapsed_time_all_ranks, "self, names, reset, barrier"
            )
        )

    def install(self) -> None:
        module = upstream_module(_MODULE)
        for name in ("start", "stop"):
            self.replace(module.Timer, name, self._alone(getattr(module.Timer, name)))
        original = module.Timers._get_elapsed_time_all_ranks

        def elapsed(timers: Any, names: Any, reset: bool, barrier: bool) -> torch.Tensor:
            if not self.local:
                found: torch.Tensor = original(timers, names, reset, barrier)
                return found
            world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
            times = torch.zeros((world, len(names)), dtype=torch.float)
            for place, name in enumerate(names):
                if name in timers._timers:
                    times[rank, place] = timers._timers[name].elapsed(reset=reset)
            return times

        self.replace(module.Timers, "_get_elapsed_time_all_ranks", elapsed)

    def _alone(self, original: Any) -> Any:
        def timed(timer: Any, barrier: bool = False) -> None:
            original(timer, barrier=barrier and not self.local)

        return timed
