"""How long does one decision of the joint planner take, and how good is the bound that it ranks by?

    .venv/bin/python tools/bench/planner.py [--repeat 5] [--json]

Two clusters, one dead and one slow device each, in different replicas: 256 devices (TP 4 x PP 16
x DP 4) and 16,384 (TP 8 x PP 16 x DP 128), Qwen2.5-32B, 32 micro-batches a replica. A decision is
all of it: the progressive plan, the search, predictions, memory, bytes to move, validation. Nothing
is kept from one decision to the next.

With ``--json`` the last line is one JSON object: ``plan_256_s`` and ``plan_16384_s``, medians in
seconds of one core (CPU time, so that other programs do not count), the same by the wall clock with
``wall_`` in front, and ``bound_error_percent``: by how much the bound without transfers, by which
layouts are ranked before they are timed, lies below the time of the pipeline (mean and worst over
200 random replicas). Exit code 0 when the bounds of 0.1 s and 3 s hold, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from statistics import median
from typing import Any

from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.plan.plan import Plan, uniform_plan
from resihp_ext.scheduler.decide import decide
from resihp_ext.scheduler.maps import bounds_of
from resihp_ext.scheduler.predict import Predictor
from resihp_ext.scheduler.problem import Problem

SIZES = {"256": (4, 16, 4), "16384": (8, 16, 128)}
"""(TP, PP, DP)."""
BOUNDS_S = {"256": 0.1, "16384": 3.0}
MICRO_BATCHES = 32
SHAPE = MODELS["qwen2.5-32b"]


def problem_of(plan: Plan, p_of: dict[int, float]) -> Problem:
    """A plan whose devices have these throughputs now."""
    devices = tuple(replace(d, p=p_of.get(d.rank, d.p)) for d in plan.devices)
    return Problem(
        cluster=Cluster(devices=devices, memory_bytes=80 * 10**9),
        shape=SHAPE,
        cost=preset("a100"),
        policy=MemoryPolicy(sharded=True, sequence_parallel=True),
        current=plan,
    )


def timed(size: str, repeat: int) -> dict[str, float]:
    """Medians of one cluster."""
    tp, pp, dp = SIZES[size]
    plan = uniform_plan(
        num_layers=SHAPE.num_layers, tp=tp, pp=pp, dp=dp, micro_batches=MICRO_BATCHES * dp
    )
    # In the first stage of the first replica, and in a middle stage of the second.
    p_of = {0: 0.0, plan.replicas[1].stages[pp // 2].ranks[0]: 0.5}
    cpu_s, wall_s = [], []
    for _ in range(repeat):
        problem = problem_of(plan, p_of)
        cpu, wall = time.process_time(), time.perf_counter()
        decision = decide(problem)
        cpu_s.append(time.process_time() - cpu)
        wall_s.append(time.perf_counter() - wall)
    print(f"{size} devices: {decision.reason}")
    return {f"plan_{size}_s": median(cpu_s), f"wall_plan_{size}_s": median(wall_s)}


def bound_errors(cases: int) -> Iterator[float]:
    """Time over bound, less one, of single replicas with uneven stages."""
    random = Random(0)
    for _ in range(cases):
        pp = random.choice([4, 8, 16])
        plan = uniform_plan(
            num_layers=SHAPE.num_layers, tp=4, pp=pp, dp=1, micro_batches=random.randint(1, 40)
        )
        slow = random.sample(range(4 * pp), random.randint(0, 3))
        problem = problem_of(plan, {rank: random.uniform(0.3, 1.0) for rank in slow})
        predictor = Predictor(problem)
        stages, _ = predictor.parts(plan.replicas[0])
        bounds = bounds_of([stage.run for stage in stages])
        bound_s = max(bound.at_least_s(plan.micro_batches) for bound in bounds)
        yield predictor.chain_s(plan.replicas[0], plan.micro_batches) / bound_s - 1


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--repeat", type=int, default=5, help="decisions of which to take the median"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for size in SIZES:
        result |= timed(size, options.repeat)
    errors = [100 * error for error in bound_errors(200)]
    result["bound_error_percent"] = {"mean": sum(errors) / len(errors), "worst": max(errors)}
    print(json.dumps(result) if options.json else result)
    good = all(result[f"plan_{size}_s"] <= BOUNDS_S[size] for size in SIZES)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
