"""Which process is which rank: ``workers/RANK.json`` in the job's folder.

Every worker writes its own when it starts, whole or not at all; a replacement overwrites that of
the one it replaces. A pid alone says nothing about a process that has ended, since pids are used
again: the time at which it started, and the machine, go with it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from megatron.resilience.faults.processes import stat_of
from resihp_ext.errors import UserError


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a job."""

    rank: int
    node: str
    pid: int
    incarnation: int
    """How many processes had this rank before."""
    agent_pid: int | None
    """The launcher's; None for a job without one."""
    start_ticks: int
    """When it started, in clock ticks since the machine did."""
    agent_start_ticks: int | None
    host: str
    boot: str
    """The machine, and since when it runs."""


def register(
    folder: Path, *, rank: int, node: str, incarnation: int = 0, agent_pid: int | None = None
) -> Worker:
    """Writes down this process.

    Args:
        folder: ``--resilience-dir``.

    Raises:
        UserError: the folder cannot be written.
    """
    own = stat_of(os.getpid())
    agent = None if agent_pid is None else stat_of(agent_pid)
    assert own is not None, "this process runs"
    worker = Worker(
        rank=rank,
        node=node,
        pid=own.pid,
        incarnation=incarnation,
        agent_pid=None if agent is None else agent.pid,
        start_ticks=own.start_ticks,
        agent_start_ticks=None if agent is None else agent.start_ticks,
        host=socket.gethostname(),
        boot=boot_id(),
    )
    path = folder / "workers" / f"{rank}.json"
    part = path.with_suffix(f".{own.pid}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.json.encode(worker) + b"\n")
        os.replace(part, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a writable --resilience-dir") from error
    return worker


def read_workers(folder: Path) -> dict[int, Worker]:
    """All processes that were ever written down, the last of each rank.

    Raises:
        UserError: there are none, or a file is damaged.
    """
    paths = sorted((folder / "workers").glob("*.json"))
    found = {worker.rank: worker for worker in map(_read, paths)}
    if not found:
        raise UserError(
            f"{folder}: no workers/RANK.json; give the --resilience-dir of a job that runs"
        )
    return found


def node_of(folder: Path, rank: int) -> str:
    """Name of the node on which a rank runs, or ran last.

    Raises:
        UserError: it has not been written down.
    """
    return _read(folder / "workers" / f"{rank}.json").node


def _read(path: Path) -> Worker:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Worker)
    except (OSError, msgspec.MsgspecError) as error:
        raise UserError(f"{path}: {error}") from error


def is_alive(worker: Worker) -> bool:
    """Whether this very process still runs, here."""
    return worker.boot == boot_id() and _runs(worker.pid, worker.start_ticks)


def agent_is_alive(worker: Worker) -> bool:
    """Whether the launcher of this process still runs, here."""
    return worker.boot == boot_id() and _runs(worker.agent_pid, worker.agent_start_ticks)


def boot_id() -> str:
    """Differs between machines, and between two runs of one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _runs(pid: int | None, start_ticks: int | None) -> bool:
    found = None if pid is None else stat_of(pid)
    return found is not None and found.state != "Z" and found.start_ticks == start_ticks
