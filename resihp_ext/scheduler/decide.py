"""The decision: all ideas by one yardstick, the best of them chosen.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from resihp_ext.plan.plan import PlanError
from resihp_ext.scheduler.decision import Alternative, Candidate, Decision, Judge, why_not
from resihp_ext.scheduler.infeasible import InfeasibleError, no_plan
from resihp_ext.scheduler.joint import relayered, reshared, search
from resihp_ext.scheduler.predict import Predictor
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.progressive import progressive
from resihp_ext.scheduler.routes import crossed

CROSSINGS = 120
"""Routes that are played out for the best layout."""


def decide(problem: Problem, planner: str = "joint") -> Decision:
    """What to run on the devices as they are.

    Args:
        planner: ``joint``, or ``progressive``: the paper's plan, whatever it is worth.

    Raises:
        InfeasibleError: no layout of the live devices holds the model.
        PlanError: no such planner.
    """
    if planner not in PLANNERS:
        raise PlanError(f"planner {planner!r}: choose one of {', '.join(PLANNERS)}")
    if not problem.cluster.alive:
        raise no_plan(problem)
    judge = Judge(problem, Predictor(problem))
    PLANNERS[planner](problem, judge)
    won = _chosen(judge, problem.options.least_gain)
    if won is None:
        raise no_plan(problem)
    won.plan.validated()
    runners_up = _runners_up(judge.able, won, problem.options.runners_up)
    return Decision(
        plan=won.plan,
        name=won.name,
        iteration_s=won.iteration_s,
        transition_s=won.transition_s,
        moved_bytes=won.moved_bytes,
        memory_bytes=won.memory_bytes,
        effective_s=won.effective_s,
        reason=_reason(won, runners_up),
        runners_up=runners_up,
        refused=tuple(dict(judge.refused).items()),
    )


def _joint(problem: Problem, judge: Judge) -> None:
    """From the least change to the largest: the first of equal candidates is taken. A layout that
    somebody wanted is not questioned as long as nothing happens."""
    judge.offer("stay", problem.current)
    wanted = problem.base.replicas == problem.current.replicas
    if wanted and problem.current.devices == problem.cluster.devices and judge.able:
        return
    alive = all(problem.p_of[rank] > 0 for one in problem.current.replicas for rank in one.ranks)
    if alive and problem.current.devices != problem.cluster.devices:
        reordered = problem.current.next_version(devices=problem.cluster.devices)
        judge.offer("same layout", reordered)
        reshared(problem, judge)
    if problem.nominal is not None:
        back = problem.current.next_version(
            devices=problem.cluster.devices,
            replicas=problem.nominal.replicas,
            routes=problem.nominal.routes,
        )
        judge.offer("nominal", back)
    _progressive(problem, judge)
    search(problem, judge)
    best = judge.best()
    if best is not None:
        relayered(problem, judge, best.plan)
        plan = crossed(problem, judge.predictor, best.plan, CROSSINGS)
        if plan is not None:
            judge.offer("joint", plan)


def _chosen(judge: Judge, least_gain: float) -> Candidate | None:
    best = judge.best()
    for one in judge.able:
        if one.name == "stay" and best and best.effective_s > one.effective_s * (1 - least_gain):
            return one
    return best


def _progressive(problem: Problem, judge: Judge) -> None:
    try:
        judge.offer("progressive", progressive(problem))
    except InfeasibleError as error:
        judge.refused.append(("progressive", str(error)))


PLANNERS: dict[str, Callable[[Problem, Judge], None]] = {
    "joint": _joint,
    "progressive": _progressive,
}


def _runners_up(able: Sequence[Candidate], won: Candidate, most: int) -> tuple[Alternative, ...]:
    """The best of each idea, then what else came close."""
    order = sorted((one for one in able if one is not won), key=lambda one: one.order)
    order = [one for one in order if one.plan != won.plan]
    firsts = {one.name: one for one in reversed(order)}
    chosen = sorted(order, key=lambda one: one is not firsts[one.name])[:most]
    chosen.sort(key=lambda one: one.order)
    return tuple(Alternative(candidate=one, why=why_not(one, won)) for one in chosen)


def _reason(won: Candidate, runners_up: Sequence[Alternative]) -> str:
    second = runners_up[0].candidate if runners_up else None
    if won.name == "stay":
        if second is None:
            return "staying, since nothing else was looked for"
        gain = 1 - second.iteration_s / won.iteration_s
        return (
            f"staying: the best change ({second.name}) would save {max(0.0, gain):.1%} a step and "
            f"cost {second.transition_s:.1f} s"
        )
    text = (
        f"{won.name}: {won.iteration_s:.3f} s a step after {won.transition_s:.1f} s of transition "
        f"with {won.moved_bytes / 1e9:.1f} GB moved"
    )
    if second is None:
        return f"{text}, the only layout found"
    return f"{text}; the next best ({second.name}) takes {second.iteration_s:.3f} s"
