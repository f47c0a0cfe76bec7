"""ReCycle: micro-batches of a failed worker go to its peers, into the bubbles of the pipeline.

Source: BASELINES 1 (abstract, a third-party integer program, what is known of its planner). Workers
are whole TP groups: with one of its devices dead one is lost. Its micro-batches are run by the live
workers of the same stage in turn, with split backwards and staggered optimizers
(:mod:`resihp_ext.simulator.policies.recycle_schedule`). No parameters move. Slow devices are borne.
When a stage has no worker left, the job waits for repair and starts anew from its last checkpoint;
a worker that is whole again copies the state of its stage from a peer.

Without failures the schedule is 1F1B, as in the source.

Failures are normalised: workers of one stage hold the same, so it is free to say to which pipeline
a failed one belongs. Of two arrangements the faster one is taken: all failed workers in the same
pipelines, or each in another one. (The source's dynamic program looks at counts by stage, as this
does.)

Simplified: a list scheduler in place of the integer program; the check of the gradient norm after
the step, with its rollback, costs nothing. Memory: a worker holds as many activations as fit, up to
``room_ratio`` times the stages; deferred weight gradients need them, and the source does not say
how many there are.

Its plans are none of ours: replicas lack the stages that have failed, so they do not pass
:meth:`Plan.validated`.

Parameter: ``room_ratio``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import Instance, Plan, Replica, Stage
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.layout import Layout, Schedule
from resihp_ext.simulator.policies.recycle_schedule import Decoupled
from resihp_ext.simulator.policy import Answer, Policy, Undone, View
from resihp_ext.simulator.pricing import Pricing, used
from resihp_ext.simulator.restart import restart_s
from resihp_ext.simulator.setting import Setting

ROOM_RATIO = 2.0
Holes = frozenset[tuple[int, int]]
"""Pipeline and stage of workers that are not there."""


class ReCycle(Policy):
    """Adaptive pipelining, decoupled backward, staggered optimizer."""

    name = "recycle"

    def __init__(self, room_ratio: float = ROOM_RATIO) -> None:
        self.room_ratio = room_ratio

    def begin(self, setting: Setting) -> Layout:
        return Layout(plan=setting.nominal)

    def answer(self, view: View) -> Answer:
        running = view.layout
        if running is not None and used(running.plan) == self._usable(view):
            return Answer(layout=running, reason="the same workers as before")
        layout = self.layout(view.setting, view.health, self._failed(view))
        if layout is None:
            return Answer(
                layout=None,
                undone=Undone.CHECKPOINT,
                reason="a stage has no worker left: waits for repair",
            )
        if running is None:
            return Answer(
                layout=layout,
                pause_s=restart_s(view.setting),
                undone=Undone.CHECKPOINT,
                reason="every stage has a worker again: started anew from the last checkpoint",
            )
        pricing = Pricing(view.setting, view.health, running.plan)
        moved = pricing.moved_bytes(layout.plan)
        lost = len(used(view.setting.nominal)) - len(used(layout.plan))
        return Answer(
            layout=layout,
            pause_s=view.setting.cost.transition_s(moved, layout.plan),
            undone=Undone.STEP if used(running.plan) & view.health.dead else Undone.NOTHING,
            moved_bytes=sum(moved.values()),
            reason=f"micro-batches routed around workers of {lost} devices",
        )

    def _failed(self, view: View) -> frozenset[int]:
        """Ranks that take part no more; subclasses count very slow ones, too."""
        return view.health.dead

    def _usable(self, view: View) -> frozenset[int]:
        failed = self._failed(view)
        return frozenset(
            rank
            for one in view.setting.nominal.replicas
            for stage in one.stages
            if not failed & set(stage.ranks)
            for rank in stage.ranks
        )

    def layout(self, setting: Setting, health: Health, failed: frozenset[int]) -> Layout | None:
        """The faster arrangement; None: a stage has no worker."""
        nominal = setting.nominal
        live: dict[int, list[Stage]] = defaultdict(list)
        for one in nominal.replicas:
            for place, stage in enumerate(one.stages):
                if not failed & set(stage.ranks):
                    live[place].append(stage)
        stages = len(nominal.replicas[0].stages)
        count = len(nominal.replicas)
        if any(not live[place] for place in range(stages)):
            return None
        missing = [count - len(live[place]) for place in range(stages)]
        if not any(missing):
            return Layout(plan=nominal)
        plans = [
            arranged(setting, health, live, holes)
            for holes in dict.fromkeys((together(missing), apart(missing, count)))
        ]
        schedule = self._schedule(setting)
        return Layout(
            plan=min(plans, key=lambda p: step_seconds(setting, schedule, p)), schedule=schedule
        )

    def _schedule(self, setting: Setting) -> Schedule:
        build = Decoupled(_rooms(setting, self.room_ratio))
        return Schedule(
            name=f"recycle {self.room_ratio:g}", build=build, split=True, staggered=True
        )


def together(missing: Sequence[int]) -> Holes:
    """All failed workers in the first pipelines."""
    return frozenset((p, s) for s, count in enumerate(missing) for p in range(count))


def apart(missing: Sequence[int], pipelines: int) -> Holes:
    """Each in the pipeline after that of the last one."""
    holes, turn = set(), 0
    for stage, count in enumerate(missing):
        for _ in range(count):
            holes.add((turn % pipelines, stage))
            turn += 1
    return frozenset(holes)


def arranged(
    setting: Setting, health: Health, live: Mapping[int, Sequence[Stage]], holes: Holes
) -> Plan:
    """The plan with workers in all places that are no holes, those of nominal order first."""
    nominal = setting.nominal
    count, stages = len(nominal.replicas), len(nominal.replicas[0].stages)
    left = {place: iter(live[place]) for place in range(stages)}
    replicas, at = [], {}
    for pipeline in range(count):
        mine = [place for place in range(stages) if (pipeline, place) not in holes]
        for index, place in enumerate(mine):
            at[pipeline, place] = Instance(replica=pipeline, stage=index)
        replicas.append(Replica(stages=tuple(next(left[place]) for place in mine)))
    turns = [0] * stages
    routes = []
    for number in range(nominal.micro_batches):
        route = []
        for place in range(stages):
            here = at.get((number % count, place))
            if here is None:
                peers = [at[p, place] for p in range(count) if (p, place) in at]
                here = peers[turns[place] % len(peers)]
                turns[place] += 1
            route.append(here)
        routes.append(tuple(route))
    return replace(
        nominal,
        devices=health.on(setting.cluster.devices),
        replicas=tuple(replicas),
        routes=tuple(routes),
    )


def _rooms(setting: Setting, ratio: float) -> tuple[tuple[tuple[int, int], int], ...]:
    """What fits, by the layers of a stage; as many as 1F1B needs in any case."""
    problem = setting.problem(Health(), setting.nominal)
    stages, shards = setting.nominal.replicas[0].stages, len(setting.nominal.replicas)
    found = []
    for place, stage in enumerate(stages):
        memory = problem.memory(stage.depth, stage.tp, place == 0, place == len(stages) - 1, shards)
        room = int(ratio * len(stages))
        while room > len(stages) - place and memory.total(room) > setting.cluster.memory_bytes:
            room -= 1
        found.append((stage.layers, room))
    return tuple(found)


def step_seconds(setting: Setting, schedule: Schedule, plan: Plan) -> float:
    """Of one step of full micro-batches, with a meeting at its end: to compare layouts."""
    cost = setting.cost.of_plan(
        plan, setting.shape, policy=setting.memory, split_backward=schedule.split
    )
    program = schedule.build(plan, cost.full_micro_batch_s)
    return dry_run(program, cost.action_s).makespan
