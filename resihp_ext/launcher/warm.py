"""A process that has done the imports of a training script, and forks workers when one is needed.

Importing torch and Megatron takes seconds to tens of seconds; a fork takes milliseconds. The
launcher starts the script once more, and the script calls :func:`wait_if_warm` after its imports
and before it does anything else. There this one process stays and forks workers on demand.

Safe only where nothing but imports has happened: no thread (a lock that one holds stays locked in
the child), no OpenMP pool, no CUDA. Threads are reported to the launcher; with CUDA the process
refuses to serve.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from resihp_ext.errors import ResiHPError

WARM = "RESIHP_WARM"
"""Environment: in a warm process the number of its socket to the launcher."""

WARM_SIGN = "RESIHP_WARM_SIGN"
"""Environment: in a worker the file whose existence says that the script can be kept warm."""

MESSAGE_BYTES = 2**16
"""Longest message between launcher and warm process; an environment is a tenth of it."""


def wait_if_warm() -> None:
    """Marks the end of a script's imports.

    In a warm process it blocks, and returns in a forked worker only: there with the worker's
    environment, output, session and processors. Elsewhere it returns at once.
    """
    number = os.environ.pop(WARM, None)
    if number is not None:
        _serve(socket.socket(fileno=int(number)))
        return
    sign = os.environ.pop(WARM_SIGN, None)
    if sign is not None:
        # Without the sign the launcher would not dare to start the script a second time: one
        # that never calls this function would train beside the job.
        with contextlib.suppress(OSError):
            Path(sign).touch()


def refuse_if_warm() -> None:
    """Called where a job begins.

    Raises:
        ResiHPError: this is a warm process, and nobody has told it to wait.
    """
    if WARM in os.environ:
        raise ResiHPError("the script has not called wait_if_warm(): its workers start cold")


def _serve(launcher: socket.socket) -> None:
    """Forks workers until the launcher is gone; returns in a worker."""
    launcher.set_inheritable(False)
    if _uses_cuda():
        launcher.send(json.dumps({"refuses": "its imports have initialised CUDA"}).encode())
        os._exit(0)
    # Collected objects would be found again in every child, page by copied page.
    gc.collect()
    gc.freeze()
    launcher.send(json.dumps({"threads": _other_threads()}).encode())
    while True:
        raw, descriptors, _, _ = socket.recv_fds(launcher, MESSAGE_BYTES, 2)
        if not raw:
            os._exit(0)  # nothing of the script has begun: nothing is to be cleaned up
        sys.stdout.flush()
        sys.stderr.flush()
        pid = _fork()
        if pid == 0:
            launcher.close()
            _become(json.loads(raw), descriptors)
            return
        for one in descriptors:
            os.close(one)
        launcher.send(json.dumps({"pid": pid}).encode())


def _fork() -> int:
    """Forks twice, so that the worker becomes a child of the launcher, which waits for it itself.

    Returns:
        In the worker 0, else its pid; the launcher, as subreaper, has adopted it by then.
    """
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        raw = os.read(reading, 32)
        os.close(reading)
        os.waitpid(between, 0)
        return int(raw)
    os.close(reading)
    worker = os.fork()
    if worker:
        os.write(writing, str(worker).encode())
        os._exit(0)
    os.close(writing)
    return 0


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Makes this process what the launcher would have started."""
    os.setsid()
    for target, source in zip((1, 2), descriptors, strict=True):
        os.dup2(source, target)
        os.close(source)
    for stream in (sys.stdout, sys.stderr):
        # Python chose the buffering for the warm process's output, which is a file.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=stream.line_buffering or stream.isatty())
    with contextlib.suppress(OSError):  # processors may have gone since the dead worker started
        if request["cpus"]:
            os.sched_setaffinity(0, request["cpus"])
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, request["nice"])
    os.environ.pop(WARM_SIGN, None)
    os.environ.update(request["env"])


def _uses_cuda() -> bool:
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def _other_threads() -> list[str]:
    """Names of the threads that libraries have started, Python's and others."""
    tasks = Path("/proc/self/task")
    names = []
    for task in tasks.glob("[0-9]*"):
        if int(task.name) != os.getpid():
            with contextlib.suppress(OSError):
                names.append((task / "comm").read_text().strip())
    return names
