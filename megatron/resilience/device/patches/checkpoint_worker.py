"""Patch: the process that writes asynchronous checkpoints, on a machine without a GPU.

Symbol: ``async_loop`` of
``megatron.core.dist_checkpointing.strategies.async_utils.PersistentAsyncCaller``.
Versions: megatron-core 0.19.x.
Reason: the loop starts by choosing GPU ``rank % device_count()``, a division by zero here; and it
runs in a fresh process, where none of our patches are.
Delete when: upstream chooses a GPU there only if there is one.
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron.resilience.device.stand_in import CpuTorch
from megatron.resilience.patches.base import Patch, signature_drift, upstream_module

_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_MODULES = (f"{_STRATEGIES}.async_utils", f"{_STRATEGIES}.filesystem_async")
"""What the fresh process runs of upstream, and spells ``torch.cuda``."""


def run_worker(*args: Any) -> None:
    """Upstream's loop, in a process of its own, with ``torch.cuda`` standing for the CPU."""
    stand_in = CpuTorch()
    for name in _MODULES:
        vars(importlib.import_module(name))["torch"] = stand_in
    _caller().async_loop(*args)


def _caller() -> Any:
    return upstream_module(_MODULES[0]).PersistentAsyncCaller


class CheckpointWorker(Patch):
    """Starts :func:`run_worker` in the place of upstream's loop."""

    symbol = f"{_MODULES[0]}.PersistentAsyncCaller.async_loop"
    reason = "the checkpoint writer's process divides by the number of GPUs"
    delete_when = "upstream chooses a GPU there only if there is one"

    def drift(self) -> str | None:
        return signature_drift(
            _caller().async_loop,
            "rank, queue, preload_q, comp_q, log_level, cpu_priority, io_priority",
        )

    def install(self) -> None:
        self.replace(_caller(), "async_loop", staticmethod(run_worker))
