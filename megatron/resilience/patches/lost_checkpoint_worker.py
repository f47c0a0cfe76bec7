"""Patch: notice that the process which writes asynchronous checkpoints is gone.

Symbol: ``is_current_async_call_done``, ``schedule_async_call`` and ``close`` of
``megatron.core.dist_checkpointing.strategies.async_utils.PersistentAsyncCaller``.
Versions: megatron-core 0.19.x, on every device.
Reason: upstream waits for the writer's answer without end, also when it was killed.
Delete when: upstream looks whether the writer lives while it waits.
"""

from __future__ import annotations

from queue import Empty
from typing import Any

from megatron.resilience.patches.base import Patch, signature_drift, upstream_module
from resihp_ext.errors import CheckpointError

_MODULE = "megatron.core.dist_checkpointing.strategies.async_utils"
_POLL_S = 0.1


def await_answer(caller: Any, blocking: bool) -> None:
    """Takes the writer's answer, if there is one; when ``blocking`` waits for it.

    Raises:
        CheckpointError: the writer is gone and left no answer.
    """
    while caller.process is not None and caller.cur_item is None:
        alive = caller.process.is_alive()  # asked first: it may answer, then end
        try:
            caller.cur_item = caller._persistent_comp_q.get(timeout=_POLL_S if blocking else 0.0)
        except Empty:
            if not alive:
                raise _lost(caller.process) from None
            if not blocking:
                return


def _lost(process: Any) -> CheckpointError:
    return CheckpointError(
        f"the process {process.pid} that writes asynchronous checkpoints ended with exit code "
        f"{process.exitcode}; the checkpoint it was writing is incomplete and will not be loaded; "
        "start the job again with --load, or save without --async-save"
    )


class LostCheckpointWorker(Patch):
    """Raises where upstream would wait for ever."""

    symbol = f"{_MODULE}.PersistentAsyncCaller"
    reason = "upstream waits without end for a checkpoint writer that died"
    delete_when = "upstream looks whether the writer lives while it waits"
    devices = frozenset({"cpu", "cuda"})

    def drift(self) -> str | None:
        caller = upstream_module(_MODULE).PersistentAsyncCaller
        return (
            signature_drift(caller.is_current_async_call_done, "self, blocking, no_dist")
            or signature_drift(caller.schedule_async_call, "self, async_req")
            or signature_drift(caller.close, "self, abort")
        )

    def install(self) -> None:
        caller = upstream_module(_MODULE).PersistentAsyncCaller
        is_done, schedule = caller.is_current_async_call_done, caller.schedule_async_call
        close = caller.close

        def is_current_async_call_done(
            self: Any, blocking: bool = False, no_dist: bool = False
        ) -> bool:
            await_answer(self, blocking)
            return bool(is_done(self, blocking, no_dist))

        def schedule_async_call(self: Any, async_req: Any) -> None:
            process = type(self)._persistent_process
            if process is not None and not process.is_alive():
                raise _lost(process)
            schedule(self, async_req)

        def close_or_abort(self: Any, abort: bool = False) -> None:
            # Called once more when the interpreter exits, where a wait could not be interrupted.
            close(self, abort or (self.process is not None and not self.process.is_alive()))

        self.replace(caller, "close", close_or_abort)
        self.replace(caller, "is_current_async_call_done", is_current_async_call_done)
        self.replace(caller, "schedule_async_call", schedule_async_call)
