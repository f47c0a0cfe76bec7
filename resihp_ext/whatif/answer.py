"""Asks the planner, and puts figures to the job before the fault, left alone, and after.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter

from resihp_ext.plan.plan import Plan
from resihp_ext.scheduler.decide import decide
from resihp_ext.scheduler.decision import Decision
from resihp_ext.scheduler.infeasible import no_plan
from resihp_ext.scheduler.predict import Predictor, memory_bytes
from resihp_ext.whatif.scene import Scene


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """The job at one time."""

    plan: Plan
    iteration_s: float | None
    """None where no step can end."""
    memory_bytes: Mapping[int, int] = field(repr=False)
    """Most of each rank that holds a stage."""
    dead: tuple[int, ...] = ()
    """Ranks that it needs and that are dead."""

    @property
    def fullest(self) -> int:
        """The rank that needs most."""
        return max(self.memory_bytes, key=lambda rank: (self.memory_bytes[rank], -rank))

    @property
    def most_bytes(self) -> int:
        """What that rank needs."""
        return self.memory_bytes[self.fullest]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """Everything that is shown."""

    scene: Scene
    before: State
    nothing: State
    """If the job goes on as it is."""
    after: State
    decision: Decision
    planning_s: float
    """Measured; all else is the same in every run."""

    @property
    def stays(self) -> bool:
        """Whether the layout is kept."""
        return self.decision.plan.replicas == self.before.plan.replicas

    def throughput_ratio(self, state: State) -> float:
        """Over the healthy job."""
        whole_s = self.before.iteration_s
        return whole_s / state.iteration_s if whole_s and state.iteration_s else 0.0

    def tokens_per_s(self, state: State) -> float:
        """Of the whole job."""
        tokens = state.plan.micro_batches * self.scene.healthy.shape.tokens
        return tokens / state.iteration_s if state.iteration_s else 0.0


def answer(scene: Scene, clock_s: Callable[[], float] = perf_counter) -> Answer:
    """Plans for the faulty cluster.

    Raises:
        InfeasibleError: no layout of the live devices holds the model.
    """
    if not scene.faulty.cluster.alive:
        raise no_plan(scene.faulty)
    begun_s = clock_s()
    decision = decide(scene.faulty, scene.planner)
    planning_s = clock_s() - begun_s
    return Answer(
        scene=scene,
        before=_before(scene),
        nothing=_nothing(scene),
        after=State(
            plan=decision.plan,
            iteration_s=decision.iteration_s,
            memory_bytes=decision.memory_bytes,
        ),
        decision=decision,
        planning_s=planning_s,
    )


def _before(scene: Scene) -> State:
    problem = scene.healthy
    return State(
        plan=problem.current,
        iteration_s=Predictor(problem).predict(problem.current).iteration_s,
        memory_bytes=memory_bytes(problem, problem.current),
    )


def _nothing(scene: Scene) -> State:
    """The program that was made for healthy devices, on those that are left."""
    problem = scene.faulty
    plan = problem.current
    used = sorted(rank for one in plan.replicas for rank in one.ranks)
    dead = tuple(rank for rank in used if problem.p_of[rank] <= 0)
    order_p = {device.rank: device.p for device in plan.devices}
    return State(
        plan=plan,
        iteration_s=None if dead else Predictor(problem).predict(plan, order_p).iteration_s,
        memory_bytes=memory_bytes(problem, plan),
        dead=dead,
    )
