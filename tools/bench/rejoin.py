"""Does a job hold more and more when ranks die and come back, and how long does that take?

    .venv/bin/python tools/bench/rejoin.py [--cycles 25] [--seed 0] [--json] [--keep DIR]

One real job of eight ranks (TP 2 x PP 2 x DP 2), started by ``resihp-run``. Again and again one
rank is killed at a random moment; the others go on, its replacement is taken in, and when all train
in one layout again, everything is counted that is held by the ranks that are never killed (three of
the eight), by the launcher with the coordinator in it, and by the planner. With ``--json``
the last line is one JSON object:

* ``cycles``: how many were done, ``asked``: how many were to be;
* ``growth``: of the surviving ranks, from the third cycle to the last one, the worst of them:
  ``fds`` (and of them ``sockets``, ``pipes``, ``files``, ``other_fds``), ``threads``,
  ``python_threads``, ``groups`` of torch; ``rss_ratio`` (memory of their own) and ``pss_ratio``
  (without files, shared pages in parts), after the C library has handed back what it keeps of
  freed memory, and between two steps: the least of some seconds;
* ``launcher``, ``planner``: the same of these, without groups, and memory as it is;
* ``pids_unchanged``: whether the survivors are the processes that began;
* ``rejoin_median_s``, ``rejoin_s``: from a kill until all ranks trained again;
  ``recovery_median_s``: until the survivors had done again the step that was broken off;
  ``process_median_s``: until the replacement had begun;
* ``changes``: of the layout, in all; two a cycle;
* ``left_behind``: processes that outlived the launcher; ``problem``: what went wrong, or "";
* ``records``: every cycle.

Exit code 0 when all cycles were done, survivors were the same processes, nothing was left behind,
no count has grown, and no memory by more than 5 %.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from megatron.resilience.testing.chaos.holdings import COUNTS, Holdings, growth, most
from megatron.resilience.testing.chaos.rejoin import Cycle, Story, run, unchanged
from megatron.resilience.testing.corpus import write_corpus

ROOT = Path(__file__).resolve().parents[2]
BASE = 3
"""The cycle with which the last one is compared: caches are filled by then."""
MOST_MEMORY = 1.05
COUNTED = (*COUNTS, "python_threads", "groups")


def summary(story: Story, asked: int, *, same: bool) -> dict[str, Any]:
    """The keys of the benchmark."""
    cycles = story.cycles
    leftovers = list(story.ended.leftovers) if story.ended is not None else []

    def grown(held: Callable[[Cycle], Holdings | None]) -> dict[str, float] | None:
        if len(cycles) <= BASE:
            return None
        before, after = held(cycles[BASE - 1]), held(cycles[-1])
        return None if before is None or after is None else growth(before, after)

    ranks = [grown(lambda cycle, rank=rank: cycle.ranks[rank]) for rank in story.spared]
    found = [one for one in ranks if one is not None]
    return {
        "cycles": len(cycles),
        "asked": asked,
        "growth": most(found) if found else None,
        "launcher": grown(lambda cycle: cycle.others.get("launcher")),
        "planner": grown(lambda cycle: cycle.others.get("planner")),
        "pids_unchanged": same,
        **{
            f"{name}_median_s": median(values) if (values := of(cycles)) else None
            for name, of in _TIMES.items()
        },
        "rejoin_s": [cycle.rejoin_s for cycle in cycles],
        "changes": sum(cycle.changes for cycle in cycles),
        "left_behind": leftovers,
        "problem": story.problem,
        "records": [asdict(cycle) for cycle in cycles],
        "measured_on": "real CPU, gloo",
    }


_TIMES: dict[str, Callable[[list[Cycle]], list[float]]] = {
    "rejoin": lambda cycles: [cycle.rejoin_s for cycle in cycles],
    "recovery": lambda cycles: [cycle.recovery_s for cycle in cycles],
    "process": lambda cycles: [cycle.prepared_s for cycle in cycles],
}


def excess(result: dict[str, Any]) -> list[str]:
    """What speaks against the job."""
    wrong = [result["problem"]] if result["problem"] else []
    if result["cycles"] < result["asked"]:
        wrong.append(f"{result['cycles']} cycles of {result['asked']}")
    if not result["pids_unchanged"]:
        wrong.append("a rank that was not killed has another process")
    wrong += [f"left behind: {one}" for one in result["left_behind"]]
    for who in ("growth", "launcher", "planner"):
        grown = result[who] or {}
        wrong += [f"{who}: {grown[k]:+d} {k}" for k in COUNTED if grown.get(k, 0) > 0]
        wrong += [
            f"{who}: {name} {grown[name]:.3f}"
            for name in ("rss_ratio", "pss_ratio")
            if grown.get(name, 0.0) > MOST_MEMORY
        ]
    return wrong


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument("--cycles", type=int, default=25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="folder for all files; they stay")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # and the job is ended
    folder = Path(options.keep or tempfile.mkdtemp(prefix="rejoin-"))
    shutil.rmtree(folder / "job", ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    data = write_corpus(folder / "data", seed=options.seed)
    job = folder / "job"
    story = run(options.cycles, options.seed, tree=ROOT, data=data, folder=job)
    result = summary(story, options.cycles, same=bool(story.pids) and unchanged(story, job))
    wrong = excess(result)
    for line in wrong:
        print(f"PROBLEM {line}")
    if wrong:
        print(f"see {folder}")
    elif not options.keep:
        shutil.rmtree(folder)
    print({key: value for key, value in result.items() if key != "records"})
    if options.json:
        print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
