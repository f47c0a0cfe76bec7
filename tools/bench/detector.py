"""Does the detector find what is slow, and only that? The same runs for ours and for Greyhound.

    .venv/bin/python tools/bench/detector.py [--runs 200] [--healthy 10000] [--seed 0]
        [--sweep] [--json]

Runs are drawn by ``resihp_ext.detector.scene``: 8 to 64 devices, even and uneven layouts, 1 to 5 %
noise, drift and hiccups, packed batches of variable length, devices, links and hosts that become
1.1 to 4 times as slow, up to three at once, and not before both detectors have settled
(``unsettled_onsets``: faults for which that is not so).

``precision``: of all alarms, those raised while something is slow (or was in the last three steps);
``precision_culprit``: those that name culprits, and no one else. The rest is counted:
``wrong_culprit_alarms``, ``unnamed_alarms``, ``false_alarms``. ``recall``: faults of factor 1.3 or
more that were found; ``culprit_right``: of those found, the ones whose kind and ranks were named
exactly; ``delay_iterations_median`` (``_p95``): from the fault's first step to the step of its
alarm; ``false_alarms_per_1000``: of healthy iterations, in these runs. The rules are those of
``resihp_ext.detector.score``, the same for both. ``healthy``: iterations of runs without faults,
and both detectors' false alarms in them.

``--sweep``: Greyhound with a hazard of one over 50, 100, 250 and 1,000 iterations, with and without
dropping outliers; otherwise 250, dropping them.

``cost_ms_per_step_1024``: processor time for a step of 1,024 ranks: ``judge`` (median, ``_p95`` and
mean), given arrays; reading into arrays, from records with names (``read_records``) and packed ones
(``read_packed``); decoding either from MessagePack.

Exit code 0 when ours reaches recall, culprit_right and precision_culprit of 0.99, a median delay of
5 and no false alarm in the healthy iterations, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from statistics import mean, median
from typing import Any

import msgspec
import numpy as np

from resihp_ext.cost.model_shape import MODELS
from resihp_ext.detector.bocd import BocdConfig
from resihp_ext.detector.detector import Detector
from resihp_ext.detector.greyhound import Greyhound
from resihp_ext.detector.scene import Scene, draw_scene
from resihp_ext.detector.score import MATERIAL_RATIO, Score, score
from resihp_ext.detector.series import Run
from resihp_ext.detector.slots import finite_median
from resihp_ext.detector.suspect import Report
from resihp_ext.detector.timed import PackedStep, RankStep, pack
from resihp_ext.plan.plan import uniform_plan

HEALTHY_STEPS = 500
STRIDE = 1_000_000
"""Between the seeds of two benches."""
HAZARDS_STEPS = (50, 100, 250, 1000)
DEFAULT = "greyhound"
COST_STEPS = 40
Scores = dict[str, Score]
Variants = dict[str, tuple[float, bool]]
"""Greyhounds by name: hazard in steps, whether outliers are dropped."""
PLAIN: Variants = {DEFAULT: (250, True)}
SWEEP: Variants = PLAIN | {
    f"greyhound_{hazard}{'' if drop else '_all'}": (hazard, drop)
    for drop in (True, False)
    for hazard in HAZARDS_STEPS
}


def judge(scene: Scene, variants: Variants) -> Scores:
    """One run, judged by all."""
    ours = Detector(scene.plan)
    theirs = {
        name: Greyhound(scene.plan, BocdConfig(hazard_steps=hazard), drop_outliers=drop)
        for name, (hazard, drop) in variants.items()
    }
    reports: dict[str, list[Report]] = {name: [] for name in ("ours", *theirs)}
    onsets = {f.onset for f in scene.faults}
    unsettled: dict[str, int] = dict.fromkeys(reports, 0)
    run, totals_s = Run(scene), []
    first = min(onsets, default=scene.steps)
    for step, records in run:
        if step in onsets:
            for name, one in {"ours": ours, **theirs}.items():
                unsettled[name] += not one.settled
        sample = ours.reader.read(records)
        if step < first:
            totals_s.append(finite_median(sample.total_s))
        reports["ours"].append(ours.observe(step, records))
        for name, greyhound in theirs.items():
            validate = partial(run.benchmarks, greyhound.ranks, greyhound.pairs)
            reports[name].append(greyhound.judge(step, sample, validate))
    least_s = MATERIAL_RATIO * median(totals_s)
    links = [fault for fault in scene.faults if fault.kind == "link"]
    immaterial = [fault for fault in links if run.excess_s(fault) < least_s]
    scores = {name: score(scene, found, immaterial) for name, found in reports.items()}
    for name, count in unsettled.items():
        scores[name].unsettled_onsets = count
    return scores


def run_once(seed: int, variants: Variants) -> Scores:
    """One run with faults."""
    return judge(draw_scene(seed), variants)


def run_healthy(seed: int, steps: int, variants: Variants) -> Scores:
    """One run without faults."""
    return judge(draw_scene(seed, steps=steps, healthy=True), variants)


def total(scores: Iterable[Scores]) -> Scores:
    """Sums by name."""
    result: Scores = {}
    for one in scores:
        for name, value in one.items():
            result.setdefault(name, Score()).add(value)
    return result


def timed_ms(action: Callable[[], Any]) -> float:
    """Processor time: others may want the processor as well."""
    begin = time.thread_time()
    action()
    return 1e3 * (time.thread_time() - begin)


def cost_ms() -> dict[str, float]:
    """Of a step of 1,024 ranks."""
    plan = uniform_plan(num_layers=32, tp=8, pp=8, dp=16, micro_batches=64)
    shape = MODELS["llama2-7b"]
    scene = Scene(plan=plan, shape=shape, noise=0.02, faults=(), steps=COST_STEPS, seed=0)
    detector = Detector(plan)
    took: dict[str, list[float]] = {}

    def clock(name: str, action: Callable[[], Any]) -> None:
        took.setdefault(name, []).append(timed_ms(action))

    for step, records in Run(scene):
        packed = {
            rank: pack(one, detector.slots.keys[detector.slots.host_of_rank[rank]])
            for rank, one in records.items()
        }
        for name, kind, steps in (("records", RankStep, records), ("packed", PackedStep, packed)):
            wire = msgspec.msgpack.encode(list(steps.values()))
            decoder = msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]
            clock(f"decode_{name}", partial(decoder.decode, wire))
            clock(f"read_{name}", partial(detector.reader.read, steps))
        sample = detector.reader.read(packed)
        clock("judge", partial(detector.judge, step, sample))
    late = {name: values[-20:] for name, values in took.items()}
    figures = {name: median(values) for name, values in late.items()}
    figures["judge_p95"] = float(np.percentile(late["judge"], 95))
    figures["judge_mean"] = mean(late["judge"])
    return figures


def benched(args: argparse.Namespace) -> tuple[Scores, Scores]:
    """Runs with faults, and without."""
    variants = SWEEP if args.sweep else PLAIN
    first = args.seed * STRIDE
    seeds = range(first, first + args.runs)
    quiet = range(first + STRIDE // 2, first + STRIDE // 2 + -(-args.healthy // HEALTHY_STEPS))

    def scored(mapped: Callable[..., Iterator[Scores]]) -> tuple[Scores, Scores]:
        healthy = partial(run_healthy, steps=HEALTHY_STEPS, variants=variants)
        return (
            total(mapped(partial(run_once, variants=variants), seeds)),
            total(mapped(healthy, quiet)),
        )

    if args.workers == 1:
        return scored(map)
    with ProcessPoolExecutor(args.workers) as pool:
        return scored(pool.map)


def main() -> int:
    """Runs the bench."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--healthy", type=int, default=10_000, help="healthy iterations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sweep", action="store_true", help="several hazards for Greyhound")
    parser.add_argument("--verbose", action="store_true", help="every error of ours")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    scores, quiet = benched(args)
    healthy: dict[str, int] = {"iterations": 0}
    for name, one in quiet.items():
        healthy["iterations"] = one.healthy_steps
        healthy["false_alarms" if name == "ours" else f"false_alarms_{name}"] = one.alarms
    result: dict[str, Any] = {name: one.figures() for name, one in scores.items()}
    result |= {"healthy": healthy, "cost_ms_per_step_1024": cost_ms()}
    if args.verbose:
        print("\n".join(scores["ours"].notes + quiet["ours"].notes))
    for name, figures in result.items():
        print(name, *(f"{k}={v if v is None else round(v, 4)}" for k, v in figures.items()))
    if args.json:
        print(json.dumps(result | {"runs": args.runs, "seed": args.seed}))
    mine = result["ours"]
    good = min(mine[k] for k in ("recall", "culprit_right", "precision_culprit")) >= 0.99
    quick = (mine["delay_iterations_median"] or 0) <= 5
    return 0 if good and quick and healthy["false_alarms"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
