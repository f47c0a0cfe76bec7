"""Does tasks on all cores.

Promise: results do not depend on the number of processes; a task's error reaches the caller, with
the name of the task; nothing waits longer than ``limit_s`` for all of them.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import Any

from resihp_ext.errors import ResiHPError
from resihp_ext.reproduce.figure import Task

PAUSE_S = 0.2


class ReproduceError(ResiHPError):
    """A task has failed, or has taken too long."""


def run_tasks(
    tasks: Iterable[Task],
    *,
    jobs: int,
    limit_s: float,
    done: Callable[[int], None] = lambda count: None,
) -> dict[Task, Any]:
    """Does every task once.

    Args:
        jobs: Processes; 1: in this one.
        limit_s: For all together.
        done: Told how many have ended.

    Raises:
        ReproduceError: see :class:`ReproduceError`.
    """
    wanted = list(dict.fromkeys(tasks))
    until_s = time.monotonic() + limit_s
    if jobs == 1:
        return _here(wanted, until_s, done)
    # Not fork: threads of numeric libraries do not survive it.
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"))
    try:
        futures = {pool.submit(_run, task): task for task in wanted}
        found = _collected(futures, until_s, done)
    except BaseException:
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()
    return {task: found[task] for task in wanted}


def _run(task: Task) -> Any:
    return task.run()


def _here(tasks: list[Task], until_s: float, done: Callable[[int], None]) -> dict[Task, Any]:
    found: dict[Task, Any] = {}
    for task in tasks:
        if time.monotonic() > until_s:
            raise _too_long(len(tasks) - len(found))
        try:
            found[task] = task.run()
        except ResiHPError:
            raise
        except Exception as error:
            raise ReproduceError(_failed(task, error)) from error
        done(len(found))
    return found


def _collected(
    futures: dict[Future[Any], Task], until_s: float, done: Callable[[int], None]
) -> dict[Task, Any]:
    found: dict[Task, Any] = {}
    try:
        for future in as_completed(futures, timeout=max(0.0, until_s - time.monotonic())):
            task = futures[future]
            try:
                found[task] = future.result()
            except BrokenProcessPool:
                raise ReproduceError(
                    f"{_name(task)}: a process has died (no memory?); try fewer --jobs"
                ) from None
            except Exception as error:
                raise ReproduceError(_failed(task, error)) from error
            done(len(found))
    except TimeoutError:
        raise _too_long(len(futures) - len(found)) from None
    return found


def _too_long(left: int) -> ReproduceError:
    return ReproduceError(f"reproduce: {left} tasks left at the limit of time; see --limit-s")


def _failed(task: Task, error: Exception) -> str:
    return f"{_name(task)}: {type(error).__name__}: {error}"


def _name(task: Task) -> str:
    text = repr(task)
    return text if len(text) <= 200 else f"{text[:200]}..."
