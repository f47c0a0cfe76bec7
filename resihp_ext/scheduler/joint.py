"""Our own planner: devices, layers, micro-batches and routes chosen together.

The paper adapts TP, then PP, then DP, each given the one before. Here whole layouts compete: any
degree that divides the model, devices pooled over the job (what one stage excludes another may
use), a layer map for each replica, shares of micro-batches, and routes that cross. Small clusters
are searched as a whole, large ones where the damage is. All are judged by the time of their program
and the cost of getting there; staying put and the paper's plan are among the candidates, so the
outcome is never worse than they are.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

from resihp_ext.plan.plan import Plan
from resihp_ext.scheduler.decision import Judge
from resihp_ext.scheduler.layouts import Groups, Layouts
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.rebuild import rebuilt
from resihp_ext.scheduler.search_all import Whole
from resihp_ext.scheduler.search_near import NearSearch, damaged_places
from resihp_ext.scheduler.wants import allocated

SMALL = 16
"""Most live devices of a cluster that is searched as a whole, if it has few enough layouts."""
JUDGED = 256
"""Most instances of plans of a large cluster that are timed in full, all plans together."""


def search(problem: Problem, judge: Judge) -> None:
    """Offers the best layouts found."""
    _near(problem, judge)
    if len(problem.cluster.alive) <= SMALL:
        Whole(problem, judge, Layouts(problem, judge.predictor, ())).run()
    if judge.best() is None:
        rebuilt(problem, judge)


def _near(problem: Problem, judge: Judge) -> None:
    """The most promising layouts are timed, the best of these judged, the very best refined."""
    damaged = damaged_places(problem)
    untouched = [n for n in range(len(problem.base.replicas)) if n not in damaged]
    layouts = Layouts(problem, judge.predictor, untouched)
    near = NearSearch(problem, layouts, damaged)
    timed: list[tuple[float, int, Groups]] = []
    judged = max(2, JUDGED // max(1, len(problem.base.instances)))
    above = layouts.above_bound()
    for sketch in near.sketches()[: problem.options.effort]:
        least_s = min((seconds for seconds, _, _ in timed), default=inf)
        hoped_s = above * sketch.pipeline_s + sketch.ends_s
        if len(timed) >= judged and hoped_s >= least_s * (1 - 1e-4):
            break
        groups = allocated(problem, sketch.wishes, near.freed(sketch))
        if groups is None:
            continue
        timed.append((layouts.timed_s(groups) + sketch.ends_s, len(timed), groups))
    for number, (seconds, _, best) in enumerate(sorted(timed, key=lambda t: t[:2])[:judged]):
        plan = layouts.plan(best, refine=not number) if seconds < inf else None
        if plan is not None:
            judge.offer("joint", plan)


def reshared(problem: Problem, judge: Judge) -> None:
    """Offers the current layout with other shares of micro-batches."""
    current = replace(problem, nominal=None)
    numbers = range(len(problem.current.replicas))
    plan = Layouts(current, judge.predictor, numbers).plan({})
    if plan is not None:
        judge.offer("shares", plan)


def relayered(problem: Problem, judge: Judge, plan: Plan) -> None:
    """Offers the groups of a plan with new layer maps for all replicas, also for those that have no
    damage: what an earlier plan did to them may have lost its reason."""
    groups = {
        number: tuple(stage.ranks for stage in one.stages)
        for number, one in enumerate(plan.replicas)
    }
    found = Layouts(replace(problem, nominal=plan), judge.predictor, ()).plan(groups, refine=True)
    if found is not None:
        judge.offer("joint", found)
