"""A checkpoint writer that is gone is an error at once, not a wait without end."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.dist_checkpointing.strategies.async_utils import (
    AsyncRequest,
    PersistentAsyncCaller,
)

from megatron.resilience.patches.lost_checkpoint_worker import LostCheckpointWorker, await_answer
from resihp_ext.errors import CheckpointError

pytestmark = pytest.mark.unit

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def patched() -> Iterator[None]:
    patch = LostCheckpointWorker()
    patch.apply()
    yield
    patch.undo()


@pytest.fixture
def caller() -> Iterator[Any]:
    """What the patch sees of upstream's caller, with a real process and a real queue."""
    process = FORK.Process(target=time.sleep, args=(60,))
    process.start()
    yield SimpleNamespace(process=process, cur_item=None, _persistent_comp_q=FORK.Queue())
    process.kill()
    process.join(10)


def test_an_answer_is_taken(caller: Any) -> None:
    caller._persistent_comp_q.put(7)
    await_answer(caller, blocking=True)
    assert caller.cur_item == 7


def test_without_blocking_a_busy_writer_is_left_alone(caller: Any) -> None:
    await_answer(caller, blocking=False)
    assert caller.cur_item is None


@pytest.mark.timeout(20)
@pytest.mark.parametrize("blocking", [False, True])
def test_a_killed_writer_is_an_error(caller: Any, blocking: bool) -> None:
    os.kill(caller.process.pid, signal.SIGKILL)
    caller.process.join(10)
    with pytest.raises(CheckpointError, match=rf"{caller.process.pid} .* exit code -9"):
        await_answer(caller, blocking=blocking)


@pytest.mark.timeout(20)
def test_the_last_answer_of_a_writer_that_ended_counts(caller: Any) -> None:
    caller._persistent_comp_q.put(3)
    time.sleep(0.1)  # the queue's thread hands it to the pipe
    os.kill(caller.process.pid, signal.SIGKILL)
    caller.process.join(10)
    await_answer(caller, blocking=True)
    assert caller.cur_item == 3


@pytest.mark.timeout(20)
@pytest.mark.usefixtures("patched")
def test_a_dead_writer_gets_no_work_and_closing_does_not_wait(
    caller: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.kill(caller.process.pid, signal.SIGKILL)
    caller.process.join(10)
    queue = FORK.JoinableQueue()
    queue.put("a request that nobody will ever mark as done")
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_process", caller.process)
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_queue", queue)
    monkeypatch.setattr(PersistentAsyncCaller, "_persistent_comp_q", caller._persistent_comp_q)
    upstream = PersistentAsyncCaller()
    upstream.process = caller.process
    request = AsyncRequest(async_fn=print, async_fn_args=(), finalize_fns=[])
    with pytest.raises(CheckpointError, match="exit code -9"):
        upstream.schedule_async_call(request)
    with pytest.raises(CheckpointError, match="exit code -9"):
        upstream.is_current_async_call_done(blocking=True, no_dist=True)
    upstream.close()
    assert upstream.process is None
