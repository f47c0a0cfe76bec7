"""Patch: let the making of a process group be broken off.

Symbol: the creators of gloo and NCCL in ``torch.distributed.Backend``.
Versions: torch 2.14, on every device; without a guard, torch's own creators run as they are.
Reason: a member that dies while a group is made leaves those who wait for its connection waiting
for several times the group's timeout, inside C++, where nothing wakes them.
Delete when: torch's groups can be made without blocking, or aborted while they are made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from megatron.resilience.patches.base import Patch

Guard = Callable[[Callable[[], Any]], Any]
"""Calls what makes a group; may raise in its stead."""


class GroupBirth(Patch):
    """Makes groups through ``guard``, when there is one."""

    symbol = "torch.distributed.Backend creators of gloo and NCCL"
    reason = "a group can be given up while it is made"
    delete_when = "torch can abort a group that is being made"
    devices = frozenset({"cpu", "cuda"})

    def __init__(self) -> None:
        super().__init__()
        self.guard: Guard | None = None

    def drift(self) -> str | None:
        register = getattr(dist.Backend, "_ensure_backend_registered", None)
        if register is None or not hasattr(dist.Backend, "_plugins"):
            return "torch.distributed.Backend keeps its creators elsewhere"
        register("gloo")
        plugin = dist.Backend._plugins.get("GLOO")
        if not (hasattr(plugin, "creator_fn") and hasattr(plugin, "_replace")):
            return "the creator of gloo groups has another form"
        return None

    def install(self) -> None:
        if dist.is_nccl_available():
            dist.Backend._ensure_backend_registered("nccl")
        plugins = dict(dist.Backend._plugins)
        for name in {"GLOO", "NCCL"} & plugins.keys():
            guarded = self._guarded(plugins[name].creator_fn)
            plugins[name] = plugins[name]._replace(creator_fn=guarded)
        self.replace(dist.Backend, "_plugins", plugins)

    def _guarded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create(*args: Any) -> Any:
            if self.guard is None:
                return original(*args)
            return self.guard(lambda: original(*args))

        return create
