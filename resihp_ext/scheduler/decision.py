"""The outcome of planning: the plan, what it is expected to do, and what it was compared with.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from resihp_ext.plan.plan import Plan
from resihp_ext.scheduler.movement import lacking_bytes
from resihp_ext.scheduler.predict import Predictor, memory_bytes
from resihp_ext.scheduler.problem import Problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan with all figures by which plans are compared."""

    name: str
    """Which idea it comes from."""
    plan: Plan
    iteration_s: float
    transition_s: float
    moved_bytes: int
    """That ranks need and do not hold, all together."""
    memory_bytes: Mapping[int, int] = field(repr=False)
    """Most of each rank that holds a stage."""
    effective_s: float
    """Seconds a step over the plan's expected lifetime, the transition included."""

    @property
    def order(self) -> tuple[float, float, float]:
        """Smaller is better. By step and transition, where the lifetime is too short for either of
        two: something must run, and it may last longer than expected."""
        if self.effective_s < inf:
            return (self.effective_s, 0.0, 0.0)
        return (inf, self.iteration_s, self.transition_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Alternative:
    """A candidate that was not chosen."""

    candidate: Candidate
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What to run, and why."""

    plan: Plan
    """The current one, if it is best to stay."""
    name: str
    iteration_s: float
    transition_s: float
    moved_bytes: int
    memory_bytes: Mapping[int, int] = field(repr=False)
    effective_s: float
    reason: str
    """One sentence."""
    runners_up: tuple[Alternative, ...] = field(repr=False)
    refused: tuple[tuple[str, str], ...]
    """Ideas that came to nothing, each with the reason."""


def effective_s(iteration_s: float, transition_s: float, lifetime_s: float) -> float:
    """The lifetime over the steps that fit into what the transition leaves of it."""
    if transition_s >= lifetime_s:
        return inf
    return iteration_s * lifetime_s / (lifetime_s - transition_s)


class Judge:
    """Puts figures to plans, all by the same yardstick, and keeps those that can run."""

    def __init__(self, problem: Problem, predictor: Predictor) -> None:
        self._problem, self.predictor = problem, predictor
        self.able: list[Candidate] = []
        self.refused: list[tuple[str, str]] = []
        self._best: Candidate | None = None

    def offer(self, name: str, plan: Plan) -> Candidate | None:
        """Judges a plan. The current one is judged with its present program."""
        problem = self._problem
        dead = sorted(r for one in plan.replicas for r in one.ranks if problem.p_of[r] <= 0)
        memory = {} if dead else memory_bytes(problem, plan)
        if why := _refusal(dead, memory, problem.cluster.memory_bytes):
            self.refused.append((name, why))
            return None
        stays = plan is problem.current
        order_p = {device.rank: device.p for device in plan.devices} if stays else None
        moved = {} if stays else lacking_bytes(problem, plan)
        iteration_s = self.predictor.predict(plan, order_p).iteration_s
        transition_s = 0.0 if stays else problem.cost.transition_s(moved, plan)
        lifetime_s = problem.options.expected_lifetime_s
        candidate = Candidate(
            name=name,
            plan=plan,
            iteration_s=iteration_s,
            transition_s=transition_s,
            moved_bytes=sum(moved.values()),
            memory_bytes=memory,
            effective_s=effective_s(iteration_s, transition_s, lifetime_s),
        )
        self.able.append(candidate)
        if self._best is None or candidate.order < self._best.order:
            self._best = candidate
        return candidate

    def limit_s(self) -> float:
        """A change with a step of this length is no better than the best."""
        if self._best is None:
            return inf
        problem = self._problem
        lifetime_s = problem.options.expected_lifetime_s
        least_s = problem.cost.transition_s({}, problem.current)
        if self._best.effective_s < inf:
            return self._best.effective_s * max(0.0, 1 - least_s / lifetime_s)
        # No change at all is in time, or one with a longer step may be.
        return self._best.iteration_s if least_s >= lifetime_s else inf

    def best(self) -> Candidate | None:
        """Of equal candidates the first."""
        return self._best


def _refusal(dead: Sequence[int], memory: Mapping[int, int], there: int) -> str | None:
    if dead:
        return f"rank {dead[0]} is dead" if len(dead) == 1 else f"ranks {dead} are dead"
    rank, most = max(memory.items(), key=lambda item: (item[1], -item[0]))
    if most > there:
        return f"rank {rank} needs {most / 1e9:.1f} GB, {there / 1e9:.1f} GB are there"
    return None


def why_not(lost: Candidate, won: Candidate) -> str:
    """What speaks against a candidate that could run."""
    slower = lost.iteration_s / won.iteration_s - 1
    longer_s = lost.transition_s - won.transition_s
    if slower > 1e-4 and longer_s > 1e-3:
        return f"{slower:.1%} slower a step, and {longer_s:.1f} s more to get there"
    if slower > 1e-4:
        return f"{slower:.1%} slower a step"
    if longer_s > 1e-3:
        return f"{longer_s:.1f} s more to get there, and at most {max(0.0, -slower):.1%} faster"
    return "the same figures, found later"
