"""What a process holds of its machine: open files by kind, threads, memory; as ``/proc`` tells it.

A process that runs for weeks must hold no more after the hundredth failure than after the third.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

COUNTS = ("fds", "sockets", "pipes", "files", "other_fds", "threads")
"""Of which a single one more is too much, cycle after cycle."""
BYTES = ("rss_bytes", "pss_bytes")

Holdings = dict[str, int]
"""Numbers by name: all of :data:`COUNTS` and :data:`BYTES`."""


def holdings(pid: int | str = "self") -> Holdings:
    """What a process holds now.

    Memory is what is resident: without what it shares with others on purpose (``rss_bytes``), and
    without files as well, with every shared page counted in parts (``pss_bytes``). Pages of files
    are no measure in parts: each process has more of them when others have touched fewer.

    Raises:
        OSError: there is no such process, or it is not ours to look into.
    """
    folder = Path("/proc") / str(pid)
    kinds = [_kind(name) for name in _links(folder / "fd")]
    status = _sizes(folder / "status")
    return {
        "fds": len(kinds),
        **{kind: kinds.count(kind) for kind in ("sockets", "pipes", "files", "other_fds")},
        "threads": len(os.listdir(folder / "task")),
        "rss_bytes": status["VmRSS"] - status["RssShmem"],
        "pss_bytes": _sizes(folder / "smaps_rollup")["Pss_Anon"],
    }


def least(samples: Iterable[Mapping[str, int]]) -> Holdings:
    """What is held in all of several looks: what comes and goes is no leak.

    Raises:
        ValueError: there is no sample.
    """
    first, *others = samples
    return {name: min([value, *(one[name] for one in others)]) for name, value in first.items()}


def growth(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, float]:
    """How many more there are of what is counted, and the ratio of what is measured in bytes."""
    return {
        name.replace("_bytes", "_ratio"): after[name] / max(value, 1)
        if name.endswith("_bytes")
        else after[name] - value
        for name, value in before.items()
    }


def most(growths: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The worst of several processes, name by name.

    Raises:
        ValueError: there are none.
    """
    first, *others = growths
    return {name: max([value, *(one[name] for one in others)]) for name, value in first.items()}


def _links(folder: Path) -> list[str]:
    found = []
    for name in os.listdir(folder):
        # The descriptor of the listing itself is gone by now; others may be, too.
        with suppress(FileNotFoundError):
            found.append(os.readlink(folder / name))
    return found


def _kind(link: str) -> str:
    if link.startswith("/"):
        return "files"
    return {"socket": "sockets", "pipe": "pipes"}.get(link.partition(":")[0], "other_fds")


def _sizes(path: Path) -> dict[str, int]:
    """Every line of the form ``name: number kB``, in bytes."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0].rstrip(":"): int(row[1]) * 1024 for row in rows if row[-1] == "kB"}
