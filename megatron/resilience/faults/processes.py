"""Processes as ``/proc`` shows them, and the end of a whole tree of them."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Stat:
    """One line of ``/proc/PID/stat``."""

    pid: int
    state: str
    """One letter: R runs, S sleeps, T is stopped, Z has ended."""
    parent: int
    start_ticks: int
    """When it started, in clock ticks since the machine did: pids are used again, this is not."""


def stat_of(pid: int) -> Stat | None:
    """What a process is now; None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command name, in brackets, may hold anything: split behind its closing bracket.
    fields = text.rpartition(")")[2].split()
    return Stat(pid=pid, state=fields[0], parent=int(fields[1]), start_ticks=int(fields[19]))


def ancestors(pid: int) -> list[int]:
    """Parent, its parent, and so on."""
    chain: list[int] = []
    while (found := stat_of(pid)) is not None and found.parent > 0:
        pid = found.parent
        chain.append(pid)
    return chain


def descendants(pid: int) -> set[int]:
    """Children, their children, and so on, as far as they still run."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        found = stat_of(int(folder.name))
        if found is not None and found.state != "Z":
            children.setdefault(found.parent, []).append(found.pid)
    below: set[int] = set()
    fresh = {pid}
    while fresh:
        fresh = {child for one in fresh for child in children.get(one, ())} - below
        below |= fresh
    return below


def kill_tree(root: int) -> None:
    """Ends a process and all its descendants as the loss of a machine does: at once, no last words.

    All are stopped first, so that none starts another or reports the death of a third. The caller
    may be one of them: it is the last to go.
    """
    own = os.getpid()
    stopped: set[int] = set()
    while fresh := ({root} | descendants(root)) - stopped - {own}:
        for pid in fresh:
            _send(pid, signal.SIGSTOP)
        stopped |= fresh
    suicide = own == root or own in descendants(root)
    for pid in stopped:
        _send(pid, signal.SIGKILL)
    if suicide:
        os.kill(own, signal.SIGKILL)


def _send(pid: int, signum: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
