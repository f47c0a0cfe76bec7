"""What a job without resilience does when a worker dies: torchrun starts all of them anew, and they
go on from the last checkpoint."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median

from megatron.resilience.testing.chaos.processes import Command, Processes, variable
from megatron.resilience.testing.chaos.scenario import INTERVAL, RANKS, common_flags

LIMIT_S = 400.0
RESTARTS = 3
_LINE = re.compile(r"^.* iteration +(\d+)/", re.MULTILINE)


class Watch:
    """When each iteration was first seen in a log, and when one was done again."""

    def __init__(self, log: Path, *, kill_after: int) -> None:
        self._log = log
        self._kill_after = kill_after
        self._read = 0
        self._text = ""
        self.seen_s: dict[int, float] = {}
        self.killed_s = 0.0
        self.repeated_s = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is time to kill."""
        return not self.killed_s and self._kill_after in self.seen_s

    def look(self) -> None:
        """Reads what was added."""
        with self._log.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        self._read += len(added)
        self._text += added.decode(errors="replace")
        *whole, self._text = self._text.split("\n")
        for step in map(int, _LINE.findall("\n".join(whole))):
            now_s = time.time()
            if not self.killed_s:
                self.seen_s.setdefault(step, now_s)
            elif step > self._kill_after and not self.repeated_s:
                self.repeated_s = now_s


def restart_s(*, seed: int, tree: Path, data: Path, folder: Path) -> float | None:
    """Seconds from a kill to the end of the step that it had interrupted, without the time that the
    step takes anyway; None when there was none."""
    folder.mkdir(parents=True)
    random = Random(seed)
    # Anywhere between two checkpoints.
    kill_after = random.randint(INTERVAL, 2 * INTERVAL - 1)
    victim = random.randrange(RANKS)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    words += ["--standalone", "--max-restarts", str(RESTARTS), "pretrain_gpt.py"]
    checkpoints = str(folder / "checkpoints")
    words += [*common_flags(data), "--save", checkpoints]
    # There is none yet: Megatron starts from nothing then, and from the last one after the kill.
    words += ["--load", checkpoints]
    watch = Watch(folder / "log", kill_after=kill_after)
    # Otherwise workers that are started anew find the addresses of the dead ones in torch's store.
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    command = Command(words=words, log=folder / "log", environment=fresh)
    with Processes([command], tree=tree) as job:

        def look() -> None:
            watch.look()
            if watch.is_due:
                pid = next(one for one in job.pids() if variable(one, "RANK") == str(victim))
                watch.killed_s = time.time()
                os.kill(pid, signal.SIGKILL)

        job.wait(LIMIT_S, look, until=lambda: bool(watch.repeated_s))
    if not watch.repeated_s:
        return None
    times = sorted(watch.seen_s.values())
    normal_s = median(b - a for a, b in pairwise(times))
    return watch.repeated_s - watch.killed_s - normal_s
