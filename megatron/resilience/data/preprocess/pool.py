"""Worker processes with results in order, bounded memory, and no way to wait for ever.

Promise: a worker that dies, hangs or is stopped ends the run with one :class:`WorkerError`; the
number of chunks in flight is bounded; when this process disappears its workers end by themselves.

Why not ``concurrent.futures``: its workers share one result pipe, so a worker killed in the middle
of a large result leaves the reader waiting for the rest. Here every worker has its own socket, and
there are no threads, which keeps fork and signals simple.
"""

import multiprocessing
import os
import signal
import socket
import struct
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

from megatron.resilience.data.preprocess.records import Chunk, ChunkResult
from megatron.resilience.data.preprocess.stopping import STOP_SIGNALS, signals_held
from resihp_ext.errors import ResiHPError

_IN_FLIGHT_PER_WORKER = 4
_JOIN_TIMEOUT_S = 5.0

Work = Callable[[Chunk], ChunkResult]


class WorkerError(ResiHPError):
    """A worker died, hangs or failed in a way that is not the input's fault."""


@dataclass(kw_only=True, slots=True, eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    chunk: Chunk | None = None
    """What it works on; None when idle."""


class WorkerPool:
    """Runs ``work`` over chunks in forked processes. Use as a context manager."""

    def __init__(self, work: Work, *, workers: int, silence_timeout_s: float) -> None:
        """Prepare; nothing is forked before ``__enter__``.

        Args:
            work: runs in the workers; inherited by fork, so it need not be picklable.
            workers: number of processes.
            silence_timeout_s: give up when no worker delivers, or takes work, for this long.
        """
        self._work = work
        self._count = workers
        self._silence_timeout_s = silence_timeout_s
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("fork")
        # A signal between fork and the reset of its handlers would run ours in the child.
        with signals_held():
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                inherited = [worker.connection for worker in self._workers] + [ours]
                process = context.Process(
                    target=_serve, args=(self._work, theirs, inherited), daemon=True
                )
                process.start()
                theirs.close()
                _bound_blocking(ours, self._silence_timeout_s)
                self._workers.append(_Worker(process=process, connection=ours))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        for worker in self._workers:
            worker.process.join(_JOIN_TIMEOUT_S)
        self._workers.clear()

    def ordered_map(self, chunks: Iterable[Chunk]) -> Iterator[ChunkResult]:
        """Yield the results in the order of ``chunks``, which are drawn only as needed.

        Raises:
            WorkerError: a worker died, failed, or all were silent for too long.
        """
        pending = enumerate(chunks)
        done: dict[int, ChunkResult] = {}
        drawn = delivered = 0
        exhausted = False
        while True:
            while delivered in done:
                yield done.pop(delivered)
                delivered += 1
            for worker in [w for w in self._workers if w.chunk is None]:
                if exhausted or drawn - delivered >= _IN_FLIGHT_PER_WORKER * self._count:
                    break
                drawn_next = next(pending, None)
                if drawn_next is None:
                    exhausted = True
                else:
                    self._give(worker, *drawn_next)
                    drawn += 1
            if all(worker.chunk is None for worker in self._workers):
                return
            done.update(self._collect())

    def _give(self, worker: _Worker, index: int, chunk: Chunk) -> None:
        worker.chunk = chunk
        try:
            worker.connection.send((index, chunk))
        except BlockingIOError as error:
            raise self._silent() from error
        except OSError as error:
            raise _death_of(worker) from error

    def _collect(self) -> Iterator[tuple[int, ChunkResult]]:
        """Wait for at least one event; yield the results that are there."""
        busy = {w.connection: w for w in self._workers if w.chunk is not None}
        alive = {w.process.sentinel: w for w in self._workers}
        ready = wait([*busy, *alive], self._silence_timeout_s)
        if not ready:
            raise self._silent()
        for sentinel, worker in alive.items():
            if sentinel in ready:
                raise _death_of(worker)
        for connection, worker in busy.items():
            if connection in ready:
                yield self._receive(worker)

    def _receive(self, worker: _Worker) -> tuple[int, ChunkResult]:
        try:
            index, result, failure = worker.connection.recv()
        except BlockingIOError as error:
            raise self._silent() from error
        except (EOFError, OSError) as error:
            raise _death_of(worker) from error
        if failure:
            where = worker.chunk.where if worker.chunk else "an unknown chunk"
            raise WorkerError(f"a worker failed on {where}: {failure.strip().splitlines()[-1]}")
        worker.chunk = None
        return index, result

    def _silent(self) -> WorkerError:
        busy = [w for w in self._workers if w.chunk is not None]
        where = busy[0].chunk.where if busy and busy[0].chunk else "nothing"
        return WorkerError(
            f"no worker delivered for {self._silence_timeout_s:g} s (oldest work: {where}); "
            "is one stopped, or is a file system hanging?"
        )


def _death_of(worker: _Worker) -> WorkerError:
    """Describe the end of a worker; its socket can break a moment before it can be reaped."""
    worker.process.join(_JOIN_TIMEOUT_S)
    code = worker.process.exitcode
    how = f"with exit code {code}"
    if code is not None and code < 0:
        how = f"by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += " (out of memory?)"
    where = f"while it worked on {worker.chunk.where}" if worker.chunk else "while it was idle"
    return WorkerError(f"worker {worker.process.pid} was ended {how} {where}")


def _bound_blocking(connection: Connection, timeout_s: float) -> None:
    """Give every read and write of our end of a socket a time limit: BlockingIOError after it.

    Without it a worker that is stopped in the middle of a message would block us for ever.
    """
    limit = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _serve(work: Work, connection: Connection, inherited: list[Connection]) -> None:
    """Answer chunks until the other end closes."""
    # Copies of the parent's ends must go: else a dead parent would never read as end of file.
    for other in inherited:
        other.close()
    # Ctrl-C reaches the whole group: the parent alone decides and ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stop in STOP_SIGNALS - {signal.SIGINT}:
        signal.signal(stop, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        while True:
            index, chunk = connection.recv()
            connection.send(_answer(work, index, chunk))
    except (EOFError, ConnectionError):
        return


def _answer(work: Work, index: int, chunk: Chunk) -> tuple[int, Any, str | None]:
    try:
        return index, work(chunk), None
    except Exception:  # noqa: BLE001 - process boundary: forwarded to the parent
        return index, None, traceback.format_exc()
