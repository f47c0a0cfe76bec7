"""Does the detector find what is slow, and only that? The same runs for ours and for Greyhound.

    .venv/bin/python tools/bench/detector.py [--runs 200] [--healthy 10000] [--seed 0] [--json]

Runs are drawn by ``resihp_ext.detector.series``: 8 to 64 devices, 1 to 5 % noise, packed batches of
variable length, devices, links and hosts that become 1.1 to 4 times as slow, up to three at once.

An alarm is a report with suspects, or one that calls an iteration slow for no known reason. It is
true when something is slow at that step or was within the last three. A fault of factor 1.3 or more
is found when its culprit is named while it lasts, or, failing that, when an alarm comes while it
lasts that names no other fault's culprit. ``precision``: true alarms of all; ``recall``: faults
found; ``culprit_right``: of those found, the ones whose kind and ranks were named exactly;
``delay_iterations_median`` (``_p95``): from the fault's first step to the step of its alarm;
``false_alarms_per_1000``: of healthy iterations, in these runs. A fault under 1.3 counts in
precision alone. ``healthy``: iterations of runs without faults, and ours' false alarms in them.
``cost_ms``: of a step of 1,024 ranks, once the records are arrays, and reading the records.

Exit code 0 when ours reaches recall and culprit_right of 0.99, a median delay of 5 and no false
alarm in the healthy iterations, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from resihp_ext.cost.model_shape import MODELS
from resihp_ext.detector.detector import Detector
from resihp_ext.detector.greyhound import Greyhound
from resihp_ext.detector.series import Fault, Run, Scene, draw_scene
from resihp_ext.detector.suspect import Report
from resihp_ext.plan.plan import uniform_plan

FACTOR = 1.3
GRACE = 3
HEALTHY_STEPS = 500
STRIDE = 1_000_000
"""Between the seeds of two benches."""


@dataclass(kw_only=True)
class Score:
    """Counts of one or more runs."""

    alarms: int = 0
    true_alarms: int = 0
    faults: int = 0
    found: int = 0
    right: int = 0
    healthy_steps: int = 0
    delays: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, other: Score) -> None:
        """Adds the counts of another."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    def figures(self, runs: int) -> dict[str, Any]:
        """As the bench prints them."""
        false = self.alarms - self.true_alarms
        return {
            "precision": self.true_alarms / self.alarms if self.alarms else 1.0,
            "recall": self.found / self.faults if self.faults else 1.0,
            "culprit_right": self.right / self.found if self.found else 1.0,
            "delay_iterations_median": median(self.delays) if self.delays else None,
            "delay_iterations_p95": float(np.percentile(self.delays, 95)) if self.delays else None,
            "false_alarms_per_1000": 1000 * false / max(self.healthy_steps, 1),
            "faults": self.faults,
            "runs": runs,
        }


def is_alarm(report: Report) -> bool:
    """Whether a report would start a validation."""
    return bool(report.suspects) or report.unexplained


def score(scene: Scene, reports: Sequence[Report]) -> Score:
    """Compares what was reported with what was done."""
    result = Score()
    alarms = [r for r in reports if is_alarm(r)]
    result.alarms = len(alarms)
    for report in alarms:
        true = any(f.onset <= report.step < f.end + GRACE for f in scene.faults)
        result.true_alarms += true
        if not true:
            result.notes.append(f"seed {scene.seed}: false alarm {report.step} {report.suspects}")
    result.healthy_steps = sum(all(f.at(r.step) == 1 for f in scene.faults) for r in reports)
    for fault in scene.faults:
        if fault.factor >= FACTOR:
            _score_fault(scene, fault, alarms, result)
    return result


def _names(report: Report, fault: Fault) -> bool:
    ranks = tuple(sorted(fault.ranks))
    return any(s.kind == fault.kind and tuple(sorted(s.ranks)) == ranks for s in report.suspects)


def _score_fault(scene: Scene, fault: Fault, alarms: Sequence[Report], result: Score) -> None:
    result.faults += 1
    during = [r for r in alarms if fault.onset <= r.step < fault.end]
    right = [r for r in during if _names(r, fault)]
    others = [f for f in scene.faults if f is not fault]
    loose = [r for r in during if not any(_names(r, f) for f in others)]
    best = (right or loose or [None])[0]
    if best is None:
        result.notes.append(f"seed {scene.seed}: missed {fault} noise {scene.noise:.3f}")
        return
    result.found += 1
    result.right += bool(right)
    result.delays.append(best.step - fault.onset)
    if not right:
        result.notes.append(f"seed {scene.seed}: wrong culprit of {fault}: {best.suspects}")


def run_once(seed: int) -> tuple[Score, Score]:
    """One run with faults, judged by both."""
    scene = draw_scene(seed)
    ours, theirs = Detector(scene.plan), Greyhound(scene.plan)
    steps = [(ours.observe(n, s), theirs.observe(n, s)) for n, s in Run(scene)]
    return score(scene, [a for a, _ in steps]), score(scene, [b for _, b in steps])


def run_healthy(seed: int, steps: int) -> Score:
    """One run without faults, judged by ours."""
    scene = draw_scene(seed, steps=steps, healthy=True)
    detector = Detector(scene.plan)
    return score(scene, [detector.observe(n, s) for n, s in Run(scene)])


def cost_ms() -> dict[str, float]:
    """Of a step of 1,024 ranks."""
    shape = MODELS["llama2-7b"]
    plan = uniform_plan(num_layers=32, tp=8, pp=8, dp=16, micro_batches=64)
    scene = Scene(plan=plan, shape=shape, noise=0.02, faults=(), steps=40, seed=0)
    detector = Detector(plan)
    took: dict[str, list[float]] = {"read": [], "judge": []}
    for step, records in Run(scene):
        begin = time.perf_counter()
        sample = detector.slots.read(records)
        took["read"].append(time.perf_counter() - begin)
        begin = time.perf_counter()
        detector.judge(step, sample)
        took["judge"].append(time.perf_counter() - begin)
    return {name: 1e3 * median(values[-20:]) for name, values in took.items()}


def main() -> int:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=10_000, help="healthy iterations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="every error")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ours, theirs, quiet = Score(), Score(), Score()
    first = args.seed * STRIDE
    with ProcessPoolExecutor(args.workers) as pool:
        for a, b in pool.map(run_once, range(first, first + args.runs), chunksize=4):
            ours.add(a)
            theirs.add(b)
        seeds = range(first + STRIDE // 2, first + STRIDE // 2 + -(-args.healthy // HEALTHY_STEPS))
        for one in pool.map(partial(run_healthy, steps=HEALTHY_STEPS), seeds):
            quiet.add(one)
    result = {
        "ours": ours.figures(args.runs),
        "greyhound": theirs.figures(args.runs),
        "healthy": {"iterations": quiet.healthy_steps, "false_alarms": quiet.alarms},
        "cost_ms": cost_ms(),
        "seed": args.seed,
    }
    if args.verbose:
        print("\n".join(ours.notes + quiet.notes))
    for name in ("ours", "greyhound", "healthy", "cost_ms"):
        print(name, *(f"{k}={v if v is None else round(v, 4)}" for k, v in result[name].items()))
    if args.json:
        print(json.dumps(result))
    mine = result["ours"]
    good = mine["recall"] >= 0.99 and mine["culprit_right"] >= 0.99 and quiet.alarms == 0
    return 0 if good and (mine["delay_iterations_median"] or 0) <= 5 else 1


if __name__ == "__main__":
    sys.exit(main())
