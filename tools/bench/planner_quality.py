"""How far from the best possible plan is the joint planner on small clusters?

    .venv/bin/python tools/bench/planner_quality.py [--cases 200] [--seed 0] [--json]

Each case is a random cluster of 3 to 8 devices on one or two nodes, dead and slow ones among them,
with a model of 2 to 6 layers and 2 to 6 micro-batches. The planner's step is compared with the best
of *all* of these, found by branch and bound, which leaves out only what a lower bound excludes:

* replicas: 1 to as many as the current plan has, each with 1 to one more stage than the deepest
  replica of the current plan has;
* groups: every choice of disjoint groups of live devices whose size divides the model and is at
  most that of the largest group or node (devices of one node that are equally fast are
  interchangeable, and of those that are fast enough for a group the slowest are taken);
* every layer map of each replica that fits in memory;
* every split of the micro-batches, shares of none included;
* routes: straight ones; and, where all replicas have the same layer map, those that give the
  instances of each stage any counts of micro-batches, dealt out in both ways of
  ``resihp_ext.scheduler.routes.dealt``;
* the plan of the progressive planner.

The devices of a group that spans nodes are taken in the order of nodes.

Lifetimes are endless here, so that transitions cost nothing. ``worse_than_progressive`` counts the
cases where the joint plan is slower than the progressive one, or worse by effective time with a
lifetime of a minute. With ``--json`` the last line is one JSON object: ``worst_over_exhaustive``,
``mean_over_exhaustive``, ``worse_than_progressive``, ``cases``. Exit code 0 when the worst is
within 2 % and none is worse than progressive, else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from random import Random
from typing import Any

from exhaustive_plans import Exhaustive

from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.plan.plan import Device, uniform_plan
from resihp_ext.scheduler.decide import decide
from resihp_ext.scheduler.infeasible import InfeasibleError
from resihp_ext.scheduler.options import Options
from resihp_ext.scheduler.problem import Problem

BOUND = 1.02
ENDLESS_S, SHORT_S = 1e15, 60.0
LAYOUTS = [
    (tp, pp, dp)
    for tp in (1, 2, 4)
    for pp in (1, 2, 3)
    for dp in (1, 2, 3)
    if 3 <= tp * pp * dp <= 8
]


def random_problem(random: Random) -> Problem:
    """A small cluster with damage."""
    tp, pp, dp = random.choice(LAYOUTS)
    num_layers = pp * random.randint(-(-2 // pp), 6 // pp)
    micro_batches = dp * random.randint(-(-2 // dp), 6 // dp)
    plan = uniform_plan(num_layers=num_layers, tp=tp, pp=pp, dp=dp, micro_batches=micro_batches)
    count = min(8, tp * pp * dp + random.choice([0, 0, 0, 1, 2]))
    per_node = random.choice([4, 8])
    devices = [Device(rank=rank, node=rank // per_node) for rank in range(count)]
    healthy = tuple(devices)
    for rank in random.sample(range(count), random.choice([1, 1, 2, 2, 3])):
        slow = round(random.uniform(0.2, 0.95), 2)
        devices[rank] = replace(devices[rank], p=random.choice([0.0, slow]))
    memory_bytes = random.choice([24, 48, 80, 80]) * 10**9
    return Problem(
        cluster=Cluster(devices=tuple(devices), memory_bytes=memory_bytes),
        shape=replace(
            MODELS["llama2-7b"], num_layers=num_layers, seq_length=random.choice([2048, 8192])
        ),
        cost=preset(random.choice(["a100", "h100"])),
        policy=MemoryPolicy(sharded=random.random() < 0.5, sequence_parallel=random.random() < 0.5),
        current=replace(plan, devices=healthy),
        options=Options(expected_lifetime_s=ENDLESS_S),
    )


def compared(problem: Problem) -> dict[str, Any] | None:
    """Figures of one case; None where there is no plan at all."""
    started = time.process_time()
    try:
        joint = decide(problem)
    except InfeasibleError:
        return None
    joint_done = time.process_time()
    known_s, worse = joint.iteration_s, False
    try:
        paper = decide(problem, "progressive")
        known_s = min(known_s, paper.iteration_s)
        short = replace(problem, options=Options(expected_lifetime_s=SHORT_S))
        both = decide(short).effective_s, decide(short, "progressive").effective_s
        worse = joint.iteration_s > paper.iteration_s or both[0] > both[1]
    except InfeasibleError:
        pass
    began = time.process_time()
    best_s = Exhaustive(problem, known_s).run()
    return {
        "ratio": joint.iteration_s / best_s,
        "worse": worse,
        "joint_s": joint_done - started,
        "exhaustive_s": time.process_time() - began,
    }


def main() -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200, help="random clusters")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    number = 0
    while len(rows) < options.cases:
        row = compared(random_problem(Random(f"{options.seed}/{number}")))
        if row is not None:
            rows.append({"case": number, **row})
        number += 1
    rows.sort(key=lambda row: -row["ratio"])
    for row in rows[:10]:
        print(
            f"case {row['case']:4}  {row['ratio']:.4f}  joint {row['joint_s']:.2f} s  "
            f"exhaustive {row['exhaustive_s']:.2f} s{'  worse' if row['worse'] else ''}"
        )
    result = {
        "worst_over_exhaustive": rows[0]["ratio"],
        "mean_over_exhaustive": sum(row["ratio"] for row in rows) / len(rows),
        "worse_than_progressive": sum(row["worse"] for row in rows),
        "cases": len(rows),
        "without_a_plan": number - len(rows),
        "optimal": sum(row["ratio"] < 1 + 1e-9 for row in rows),
        "joint_s": max(row["joint_s"] for row in rows),
        "exhaustive_s": max(row["exhaustive_s"] for row in rows),
        "seconds": sum(row["joint_s"] + row["exhaustive_s"] for row in rows),
    }
    print(json.dumps(result) if options.json else result)
    good = result["worst_over_exhaustive"] <= BOUND and not result["worse_than_progressive"]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
