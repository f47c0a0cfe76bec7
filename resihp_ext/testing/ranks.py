"""Real ranks in fractions of a second: processes forked from a server that has imported everything.

Starting a rank by spawning costs 5 to 25 s of imports; forking it from a preloaded server 0.1 to
0.4 s. Every wait is bounded, every process is ended, and an error in a rank reaches the caller with
its traceback and the end of its log.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

from torch import distributed

from resihp_ext.errors import ResiHPError

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""One thread a rank, or eight ranks on two cores thrash; no compilation of CPU code."""

_LOG_TAIL_CHARACTERS = 3000


class RankError(ResiHPError):
    """A rank raised, died, or did not finish in time; the text says which and shows its log."""


def preload(modules: Sequence[str]) -> None:
    """Chooses what the fork server imports; has no effect once the server runs."""
    os.environ.update(ENVIRONMENT)
    multiprocessing.set_forkserver_preload(list(modules))


@dataclass(kw_only=True, slots=True)
class Ranks:
    """A running set of ranks; use as a context manager, which ends whatever is left."""

    processes: list[Any]
    pipes: list[Connection]
    logs: list[Path]
    store: Any
    folder: Any
    results: dict[int, Any] = field(default_factory=dict)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def kill(self, rank: int) -> None:
        """Ends one rank with SIGKILL."""
        self.processes[rank].kill()

    def log(self, rank: int) -> str:
        """What a rank has written to stdout and stderr so far."""
        return self.logs[rank].read_text(errors="replace")

    def join(self, timeout_s: float, *, survivors: Sequence[int] | None = None) -> list[Any]:
        """Waits for results, in the order of ``survivors`` (default: all ranks).

        Raises:
            RankError: one of them raised, died or is not done after ``timeout_s`` seconds.
        """
        wanted = list(range(len(self.processes)) if survivors is None else survivors)
        deadline_s = time.monotonic() + timeout_s
        while missing := [rank for rank in wanted if rank not in self.results]:
            left_s = deadline_s - time.monotonic()
            ready = wait([self.pipes[rank] for rank in missing], timeout=max(0.0, left_s))
            if not ready:
                raise RankError(
                    f"ranks {missing} did not finish in {timeout_s:g} s{self._tail(missing[0])}"
                )
            for rank in missing:
                if self.pipes[rank] in ready:
                    self.results[rank] = self._receive(rank)
        return [self.results[rank] for rank in wanted]

    def close(self) -> None:
        """Ends every process, with whatever it has started, and removes the logs."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in self.processes:
            process.join(10)
        for pipe in self.pipes:
            pipe.close()
        self.folder.cleanup()

    def _receive(self, rank: int) -> Any:
        try:
            kind, value = self.pipes[rank].recv()
        except EOFError:
            self.processes[rank].join(10)
            code = self.processes[rank].exitcode
            raise RankError(f"rank {rank} died with exit code {code}{self._tail(rank)}") from None
        if kind == "error":
            raise RankError(f"rank {rank} raised\n{value}{self._tail(rank)}")
        return value

    def _tail(self, rank: int) -> str:
        return f"\n--- end of the log of rank {rank} ---\n{self.log(rank)[-_LOG_TAIL_CHARACTERS:]}"


def start_ranks(
    world_size: int,
    target: Callable[..., Any],
    *args: Any,
    environment: Mapping[str, str] | None = None,
) -> Ranks:
    """Starts ``target(*args)`` in ``world_size`` processes that find each other by ``env://``.

    Args:
        target: An importable function; its picklable result is what :meth:`Ranks.join` gives.
        environment: Variables set in every rank beside rank and rendezvous.
    """
    os.environ.update(ENVIRONMENT)
    context = multiprocessing.get_context("forkserver")
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    folder = tempfile.TemporaryDirectory(prefix="ranks-")
    processes, pipes, logs = [], [], []
    for rank in range(world_size):
        log = Path(folder.name) / f"{rank}.log"
        log.touch()
        variables = {
            **ENVIRONMENT,
            **(environment or {}),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
            # The store lives here, off the ranks, as with torchrun's agent.
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_in_rank, args=(theirs, variables, str(log), target, args))
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
        logs.append(log)
    return Ranks(processes=processes, pipes=pipes, logs=logs, store=store, folder=folder)


def run_ranks(
    world_size: int,
    target: Callable[..., Any],
    *args: Any,
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Runs ``target`` in every rank and returns the results in the order of ranks.

    Raises:
        RankError: a rank raised, died or took longer than ``timeout_s`` seconds.
    """
    with start_ranks(world_size, target, *args, environment=environment) as ranks:
        return ranks.join(timeout_s)


def _in_rank(
    pipe: Connection,
    variables: dict[str, str],
    log: str,
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    # A session of its own, so that helper processes (of an asynchronous save, say) end with it.
    os.setsid()
    # A rank of a real job would fork its helpers; here they would inherit the fork server's way.
    multiprocessing.set_start_method("fork", force=True)
    os.environ.update(variables)
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    try:
        message = ("ok", target(*args))
    except BaseException:  # noqa: BLE001 - the process boundary: the caller gets everything
        message = ("error", traceback.format_exc())
    pipe.send(message)
    pipe.close()
