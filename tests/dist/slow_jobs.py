"""What tests of slow processes share: whether this machine has quotas, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest
from jobs import ENTRY

from megatron.resilience.faults.processes import descendants
from resihp_ext.brake.cpu_group import why_not
from resihp_ext.brake.cpu_tree import find_cpu_tree

_WHY_NOT = why_not(find_cpu_tree(), os.getpid())
needs_quota = pytest.mark.skipif(_WHY_NOT is not None, reason=f"no quota of CPU time: {_WHY_NOT}")


def groups_of(launcher_pid: int) -> list[Path]:
    """The control groups of a launcher: the job's, and those in it."""
    tree = find_cpu_tree()
    job = None if tree is None else tree.own / f"resihp-{launcher_pid}"
    if job is None or not job.exists():
        return []
    return [job, *(one for one in job.iterdir() if one.is_dir())]


def start_nodes(
    folder: Path, words: Sequence[str], *, per_node: int
) -> list[subprocess.Popen[str]]:
    """Starts a job of two nodes, which share this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    nodes = []
    for node in range(2):
        flags = ["--nnodes", "2", "--nproc-per-node", str(per_node), "--rdzv-backend", "c10d"]
        flags += ["--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", str(folder)]
        flags += ["--rdzv-conf", f"is_host={int(node == 0)}", "--local-addr", "127.0.0.1"]
        started = subprocess.Popen(
            [sys.executable, "-m", "resihp_ext.launcher.run", *flags, str(ENTRY), *words],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        nodes.append(started)
    return nodes


class OthersLoad:
    """How busy the machine is with what is not of a job: a context around the job.

    Attributes:
        worst_cores: Of all stretches of a second, the most cores that others had at a time.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        """Prepares it.

        Args:
            pids: The job's launchers.
        """
        self._pids = {*pids, os.getpid()}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.worst_cores = 0.0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10)

    def _watch(self) -> None:
        before_s, busy_s, own_s = time.monotonic(), _busy_s(), self._own_s()
        while not self._ended.wait(1.0):
            now_s, now_busy_s, now_own_s = time.monotonic(), _busy_s(), self._own_s()
            # Of a process that has ended meanwhile its time is missing: what is left is others'.
            others_s = now_busy_s - busy_s - max(now_own_s - own_s, 0.0)
            self.worst_cores = max(self.worst_cores, others_s / (now_s - before_s))
            before_s, busy_s, own_s = now_s, now_busy_s, now_own_s

    def _own_s(self) -> float:
        below = set[int]().union(*map(descendants, self._pids))
        return sum(map(_worked_s, self._pids | below))


def _busy_s() -> float:
    """What all CPUs have worked, or were not given by the host, since the machine started."""
    line = Path("/proc/stat").read_text().split(maxsplit=9)
    user, nice, system, _, _, irq, softirq, steal = map(int, line[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _worked_s(pid: int) -> float:
    """What a process and those of its children that it has waited for have worked."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0
