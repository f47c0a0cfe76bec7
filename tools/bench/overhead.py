"""What does resilience cost when nothing fails? Steps of a whole job against Megatron's, in pairs.

    .venv/bin/python tools/bench/overhead.py [--json] [--pairs 5] [--steps 30] [--seed N]
        [--detect off|observe]

Both jobs train the same model in the same uniform layout on the same data: one under torchrun with
Megatron's own schedule and optimizer, one under ``resihp-run`` with ``--resilience``, heartbeats,
copies of the state in host memory every ten steps, and ``--resilience-detect`` as given (ranks
time their actions in any case). Jobs alternate, and which of a pair comes
first alternates too. Steps are counted once what happens only at the start is over: first steps,
and what the launcher prepares at low priority (a warm process, plans for what may fail). A job's
figure is the mean time of a step over periods of ten, each place in the period by its median. Keys
with ``--json``:

* ``median_ratio``: resilient over plain, the median of the pairs; ``ratios``: all of them;
  ``spread``: the largest less the smallest;
* ``copies_share``: the part of a resilient step's time that copies take: what the two steps around
  a copy take more than the others; ``copies_shares``: of all runs;
* ``iteration_s``: of both, the median of the runs; ``start_s``: from the start of the launcher
  until steps were counted;
* ``layout``, ``steps``: counted in each run; ``detect``: as given.

Exit code 0 when the median ratio is at most 1.01, else 1.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.resilience.faults.register import read_workers
from megatron.resilience.testing.chaos.processes import (
    Command,
    Processes,
    busy_s,
    children_of,
    variable,
)
from megatron.resilience.testing.chaos.run import free_port
from megatron.resilience.testing.corpus import write_corpus
from resihp_ext.launcher.warm import WARM

ROOT = Path(__file__).resolve().parents[2]
BOUND = 1.01
PERIOD = 10
"""Steps from one copy to the next."""
WARM_UP = 5
QUIET_S, QUIET_RATIO = 1.5, 0.02
"""How long helpers of the launcher have to be idle, and what counts as idle: of a core."""
LIMIT_S = 300.0
LAYOUT = {"tp": 1, "pp": 2, "dp": 2}
RANKS = LAYOUT["tp"] * LAYOUT["pp"] * LAYOUT["dp"]
SIZES = ("--num-layers", "8", "--hidden-size", "256", "--ffn-hidden-size", "768")
COPIES = ("--resilience", "--resilience-memory-copy-steps", str(PERIOD))


def flags(data: Path, seed: int, extra: Sequence[str]) -> list[str]:
    """The command line that both share."""
    words = ["--preset", "tiny", "--device", "cpu", *SIZES, "--data-path", str(data)]
    words += ["--split", "100,0,0", "--train-iters", "2000", "--eval-iters", "0"]
    words += ["--seq-length", "256", "--global-batch-size", "16", "--seed", str(seed)]
    words += ["--tensor-model-parallel-size", str(LAYOUT["tp"])]
    words += ["--pipeline-model-parallel-size", str(LAYOUT["pp"])]
    return [*words, *extra]


class Run:
    """One job, measured from outside."""

    def __init__(
        self, resilient: bool, words: Sequence[str], folder: Path, steps: int, *, detect: str
    ) -> None:
        """Prepares it.

        Args:
            steps: To be counted.
            detect: What a resilient job does about slow devices.
        """
        self._steps, self._folder = steps, folder
        self.times: list[float] = []
        """When the counted steps were done, and the one before them."""
        self.first = 0
        """Number of the step before the first that counts."""
        self.start_s = 0.0
        plain = [*_TORCHRUN, str(free_port())]
        launcher = ["-m", "resihp_ext.launcher.run"] if resilient else plain
        ours = [*COPIES, "--resilience-dir", str(folder), "--resilience-detect", detect]
        own = ours if resilient else []
        job = ["--nproc-per-node", str(RANKS), "pretrain_gpt.py", *words, *own]
        self._command = Command(words=[sys.executable, *launcher, *job], log=folder / "log")
        self._log = _Log(folder / "log")

    def measure(self) -> None:
        """Runs the job, and ends it.

        Raises:
            SystemExit: it has ended before, or takes too long.
        """
        begun_s = time.time()
        with Processes([self._command], tree=ROOT) as job:
            story = self._story(job, begun_s)
            job.wait(LIMIT_S, until=lambda: next(story, True))
        if len(self.times) <= self._steps:
            raise SystemExit(f"not enough steps; the end of its log:\n{self._end_of_log()}")

    def _story(self, job: Processes, begun_s: float) -> Iterator[bool]:
        """Says again and again that more is wanted."""
        while len(self._log.times()) < WARM_UP:
            yield False
        quiet = _Quiet(job.launcher_pid, self._folder)
        while not quiet.is_reached():
            yield False
        self.first = len(self._log.times()) + 1
        self.start_s = time.time() - begun_s
        while len(self._log.times()) < self.first + self._steps:
            yield False
        self.times = self._log.times()[self.first - 1 : self.first + self._steps]

    def _end_of_log(self) -> str:
        return self._command.log.read_text(errors="replace")[-2000:]

    def places(self) -> list[float]:
        """Median seconds of a step, by its place in the period: place 1 is the first step after the
        one whose end begins a copy."""
        found: list[list[float]] = [[] for _ in range(PERIOD)]
        for number, (before_s, after_s) in enumerate(pairwise(self.times), self.first + 1):
            found[number % PERIOD].append(after_s - before_s)
        return [statistics.median(one) for one in found]

    @property
    def iteration_s(self) -> float:
        """Seconds of a step, copies counted with the frequency that they have."""
        return statistics.fmean(self.places())

    @property
    def copies_share(self) -> float:
        """Copies begin before the first step of a period and are ended before the second."""
        places = self.places()
        others_s = statistics.median(places[3:] + places[:1])
        return (places[1] + places[2] - 2 * others_s) / (PERIOD * self.iteration_s)


class _Log:
    """When steps were done, by Megatron's own lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._rest = b""
        self._times: list[float] = []

    def times(self) -> list[float]:
        """Of all steps so far."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
        self._read += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        for line in lines:
            if found := _LINE.search(line.decode(errors="replace")):
                self._times.append(datetime.fromisoformat(found[1]).timestamp())
        return self._times


_LINE = re.compile(r"\[(\S+ \S+)\] iteration +\d+/")
_TORCHRUN = ("-m", "torch.distributed.run", "--master-port")


class _Quiet:
    """Whether the launcher's helpers have done what they do at a start."""

    def __init__(self, launcher: int, folder: Path) -> None:
        self._launcher, self._folder = launcher, folder
        self._since_s, self._busy_s = time.monotonic(), self._helpers_s()

    def is_reached(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._since_s < QUIET_S:
            return False
        busy = self._helpers_s()
        idle = busy - self._busy_s <= QUIET_RATIO * (now_s - self._since_s)
        self._since_s, self._busy_s = now_s, busy
        return idle

    def _helpers_s(self) -> float:
        # Forked workers have the environment of the warm process, as far as the system can tell.
        told = (self._folder / "workers").exists()
        ranks = {one.pid for one in read_workers(self._folder).values()} if told else set()
        helpers = (
            pid
            for pid in children_of(self._launcher)
            if pid not in ranks and (variable(pid, "RANK") is None or variable(pid, WARM))
        )
        return sum(map(busy_s, helpers))


def measure(options: argparse.Namespace, data: Path, folder: Path) -> dict[str, Any]:
    """Runs the pairs."""
    words = flags(data, options.seed, options.extra)
    runs: dict[str, list[Run]] = {"plain": [], "resilient": []}
    for pair in range(options.pairs):
        for name in sorted(runs, reverse=pair % 2 == 0):
            own = folder / f"{name}-{pair}"
            own.mkdir()
            run = Run(name == "resilient", words, own, options.steps, detect=options.detect)
            run.measure()
            runs[name].append(run)
        plain, ours = (runs[name][-1] for name in runs)
        print(
            f"pair {pair}: plain {plain.iteration_s:.4f} s, resilient {ours.iteration_s:.4f} s, "
            f"ratio {ours.iteration_s / plain.iteration_s:.4f}, copies {ours.copies_share:.4f}, "
            f"counted after {plain.start_s:.0f} and {ours.start_s:.0f} s",
            flush=True,
        )
    return summary(runs, options.steps) | {"detect": options.detect}


def summary(runs: dict[str, list[Run]], steps: int) -> dict[str, Any]:
    """The keys of the benchmark."""
    pairs = zip(runs["plain"], runs["resilient"], strict=True)
    ratios = [ours.iteration_s / plain.iteration_s for plain, ours in pairs]
    shares = [run.copies_share for run in runs["resilient"]]
    return {
        "median_ratio": statistics.median(ratios),
        "ratios": ratios,
        "spread": max(ratios) - min(ratios),
        "copies_share": statistics.median(shares),
        "copies_shares": shares,
        **{
            key: {name: statistics.median(getattr(run, key) for run in runs[name]) for name in runs}
            for key in ("iteration_s", "start_s")
        },
        "layout": LAYOUT,
        "steps": steps,
        "measured_on": "real CPU, gloo",
    }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30, help="counted in each run")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--detect", default="off", help="of the resilient jobs: off, observe, ...")
    parser.add_argument("extra", nargs="*", help="further Megatron flags, after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the job is ended
    if options.steps < 2 * PERIOD or options.steps % PERIOD:
        parser.error(f"--steps {options.steps}: give a multiple of {PERIOD}, 20 or more")
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        data = write_corpus(folder / "data", seed=options.seed)
        result = measure(options, data, folder)
    print(
        f"median ratio {result['median_ratio']:.4f} (from {min(result['ratios']):.4f} to "
        f"{max(result['ratios']):.4f}), of it copies {result['copies_share']:.4f}"
    )
    if options.json:
        print(json.dumps(result))
    return 0 if result["median_ratio"] <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
