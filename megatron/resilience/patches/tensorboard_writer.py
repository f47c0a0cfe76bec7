"""Patch: let the rank that writes for TensorBoard be another one later.

Symbol: ``megatron.training.global_vars._set_tensorboard_writer``.
Versions: megatron-core 0.19.x, on every device; without a board, upstream's own is called.
Reason: upstream chooses the writer once, by the numbers of the command line. When that rank is
lost nobody writes any more, and a process that takes its place writes beside others.
Delete when: upstream asks for the writer's rank each time that it writes.
"""

from __future__ import annotations

from typing import Any

from megatron.resilience.patches.base import Patch, signature_drift, upstream_module
from megatron.resilience.upstream.board import Board

_MODULE = "megatron.training.global_vars"


class TensorboardWriter(Patch):
    """Hands out ``board``, when there is one."""

    symbol = f"{_MODULE}._set_tensorboard_writer"
    reason = "who writes for TensorBoard may be lost"
    delete_when = "upstream asks who writes each time"
    devices = frozenset({"cpu", "cuda"})

    def __init__(self) -> None:
        super().__init__()
        self.board: Board | None = None

    def drift(self) -> str | None:
        module = upstream_module(_MODULE)
        if not hasattr(module, "_GLOBAL_TENSORBOARD_WRITER"):
            return "the writer is kept elsewhere"
        return signature_drift(module._set_tensorboard_writer, "args")

    def install(self) -> None:
        module = upstream_module(_MODULE)
        original = module._set_tensorboard_writer

        def set_tensorboard_writer(args: Any) -> None:
            if self.board is None:
                original(args)
                return

            def open_writer() -> Any:
                # Upstream opens it, on the rank that it takes for the last one: of how many it
                # thinks changes when it connects them.
                found, args.rank = args.rank, args.world_size - 1
                module._GLOBAL_TENSORBOARD_WRITER = None
                try:
                    original(args)
                    return module._GLOBAL_TENSORBOARD_WRITER
                finally:
                    args.rank, module._GLOBAL_TENSORBOARD_WRITER = found, self.board

            self.board.open_writer = open_writer
            if getattr(args, "tensorboard_dir", None):
                module._GLOBAL_TENSORBOARD_WRITER = self.board

        self.replace(module, "_set_tensorboard_writer", set_tensorboard_writer)
