"""ReCycle and Oobleck with Greyhound's detector: the paper's "strengthened" baselines.

Source: BASELINES 5 (our definition; the paper's recipe is not at hand). Both are told of slowness
by change points of the iteration time and a validation that stops all (:attr:`Sense.RAW`).

``recycle+``: on top of re-routing every stage shares its micro-batches among its workers by their
speed: integer shares, the slowest worker as fast as can be. Workers so slow that steps are shorter
without them are treated as failed. Of all these the fastest by a dry run is taken, plain 1F1B with
equal shares, or with shares for whole pipelines, among them. Level S4, a restart without the bad
parts, is never better than re-routing around them, which moves nothing, so it is left out.

``oobleck+``: micro-batches are dealt by the measured speeds of pipelines, at once and without a
pause. When as much has been lost as a reconfiguration costs (ski rental), the slowest node is
treated as failed if that makes steps shorter; it is taken back when it is healthy.

Parameters: those of the plain policies; ``patience_s``: time lost between two looks at what a
reconfiguration is worth.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from resihp_ext.plan.plan import Instance, Plan, Replica, Stage
from resihp_ext.scheduler.layouts import straight_routes
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policies.oobleck import Oobleck
from resihp_ext.simulator.policies.recycle import ROOM_RATIO, ReCycle, step_seconds
from resihp_ext.simulator.policies.restarting import LEAST_GAIN
from resihp_ext.simulator.policy import Answer, Cause, Sense, Undone, View
from resihp_ext.simulator.pricing import Pricing, used
from resihp_ext.simulator.restart import restart_s
from resihp_ext.simulator.setting import Setting

MOST_DROPS = 2
"""Levels of slowness from which on workers are tried without."""


class ReCyclePlus(ReCycle):
    """Shares by speed on top of re-routing."""

    name = "recycle+"
    sense = Sense.RAW

    def __init__(self, room_ratio: float = ROOM_RATIO) -> None:
        super().__init__(room_ratio)
        self._known: dict[Health, Layout | None] = {}

    def answer(self, view: View) -> Answer:
        running = view.layout
        if view.cause is Cause.WAITED and running is not None:
            return Answer(layout=running, reason="nothing is new")
        if view.health not in self._known:
            self._known[view.health] = self.fastest(view.setting, view.health)
        layout = self._known[view.health]
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
        if layout.plan.digest == running.plan.digest and layout.schedule == running.schedule:
            return Answer(layout=running, reason="nothing is faster")
        pause_s, moved = 0.0, 0
        if used(layout.plan) != used(running.plan):
            lacking = Pricing(view.setting, view.health, running.plan).moved_bytes(layout.plan)
            pause_s = view.setting.cost.transition_s(lacking, layout.plan)
            moved = sum(lacking.values())
        broken = bool(used(running.plan) & view.health.dead)
        return Answer(
            layout=layout,
            pause_s=pause_s,
            undone=Undone.STEP if broken else Undone.NOTHING,
            moved_bytes=moved,
            reason=f"micro-batches shared by speed on {len(used(layout.plan))} devices",
        )

    def fastest(self, setting: Setting, health: Health) -> Layout | None:
        """The fastest of all ways; None: a stage has no worker."""
        found: list[tuple[float, int, Layout]] = []
        for failed in drops(health):
            layout = self.layout(setting, health, failed)
            if layout is None:
                continue
            for one in self._shared(setting, health, failed, layout):
                seconds = step_seconds(setting, one.schedule, one.plan)
                found.append((seconds, len(found), one))
        if not found:
            return None
        best = min(found, key=lambda item: item[:2])[2]
        nominal = Layout(plan=setting.nominal)
        return nominal if best.plan.digest == nominal.plan.digest else best

    def _shared(
        self, setting: Setting, health: Health, failed: frozenset[int], layout: Layout
    ) -> Iterator[Layout]:
        """With equal shares; with shares of pipelines, if all are whole; with shares of workers."""
        plan = replace(layout.plan, devices=health.on(setting.cluster.devices))
        if plan.replicas == setting.nominal.replicas and not health.devices:
            yield Layout(plan=setting.nominal)
            return
        yield Layout(plan=plan, schedule=layout.schedule)
        if plan.replicas == setting.nominal.replicas:
            pricing = Pricing(setting, health)
            counts = pricing.dealt(plan.replicas)
            yield Layout(plan=replace(plan, routes=straight_routes(plan.replicas, counts)))
        if any(0 < p < 1 for _, p in health.devices):
            shared = by_speed(setting, health, plan)
            yield Layout(plan=shared, schedule=self._schedule(setting))


def drops(health: Health) -> list[frozenset[int]]:
    """Dead ranks; and with them all that are at most so fast, for the lowest levels there are."""
    dead = health.dead
    levels = sorted({p for _, p in health.devices if 0 < p < 1})[:MOST_DROPS]
    slow = [frozenset(rank for rank, p in health.devices if p <= level) for level in levels]
    return list(dict.fromkeys((dead, *slow)))


def by_speed(setting: Setting, health: Health, plan: Plan) -> Plan:
    """The same workers; each stage deals its micro-batches to them by their speed.

    A micro-batch stays in its pipeline while that one's worker has some of its share left, and goes
    to the worker that is furthest behind its share otherwise.
    """
    workers: dict[tuple[int, int], list[tuple[Instance, Stage]]] = defaultdict(list)
    for number, one in enumerate(plan.replicas):
        for place, stage in enumerate(one.stages):
            workers[stage.layers].append((Instance(replica=number, stage=place), stage))
    p = health.p
    total = plan.micro_batches
    routes: list[list[Instance]] = [[] for _ in range(total)]
    for layers in sorted(workers):
        mine = workers[layers]
        speeds = [min(p.get(rank, 1.0) for rank in stage.ranks) for _, stage in mine]
        shares = integer_shares(speeds, total)
        done = [0] * len(mine)
        home = {instance.replica: at for at, (instance, _) in enumerate(mine)}
        for number in range(total):
            at = home.get(plan.routes[number][0].replica, -1)
            due = shares[at] * (number + 1) / total if at >= 0 else 0.0
            if at < 0 or done[at] >= shares[at] or done[at] > due + 1:
                behind = [
                    (shares[i] * (number + 1) / total - done[i], -i)
                    for i in range(len(mine))
                    if done[i] < shares[i]
                ]
                at = -max(behind)[1]
            done[at] += 1
            routes[number].append(mine[at][0])
    return replace(plan, routes=tuple(map(tuple, routes)))


def integer_shares(speeds: Sequence[float], total: int) -> list[int]:
    """Whole shares of ``total`` that make ``max(share / speed)`` least.

    One after the other goes to who is fastest with one more; exact, since times grow with shares
    and only their sum is given.
    """
    shares = [0] * len(speeds)
    for _ in range(total):
        at = min(range(len(speeds)), key=lambda i: ((shares[i] + 1) / speeds[i], i))
        shares[at] += 1
    return shares


class OobleckPlus(Oobleck):
    """Micro-batches by measured speeds; very slow nodes are left out."""

    name = "oobleck+"
    sense = Sense.RAW
    patience_s = 5.0

    def __init__(self, spare: int = 1) -> None:
        super().__init__(spare)
        self._dropped: set[int] = set()
        """Nodes that are treated as failed, for their slowness."""

    def lost_nodes(self, view: View) -> frozenset[int]:
        return super().lost_nodes(view) | self._dropped

    def deal(self, pricing: Pricing, replicas: Sequence[Replica]) -> list[int]:
        """Micro-batches of each pipeline by its speed."""
        return pricing.dealt(replicas)

    def answer(self, view: View) -> Answer:
        node_of = view.setting.cluster.node_of
        slow = {node_of[rank]: p for rank, p in reversed(view.health.devices) if 0 < p < 1}
        self._dropped &= set(slow)
        if view.layout is not None and view.lost_s > 0 and slow.keys() - self._dropped:
            self._drop(view, {n: p for n, p in slow.items() if n not in self._dropped})
        found = super().answer(view)
        if found.layout is None or found.layout is not view.layout:
            return found
        pricing = Pricing(view.setting, view.health, view.layout.plan)
        plan = self._plan(pricing, self._pipelines)
        if plan.routes == view.layout.plan.routes:
            return found
        return Answer(layout=Layout(plan=plan), reason="micro-batches dealt by measured speeds")

    def _drop(self, view: View, slow: Mapping[int, float]) -> None:
        """Gives up the slowest node, if what it has cost pays for that and steps become shorter."""
        assert view.layout is not None
        worst = min(slow, key=lambda node: (slow[node], node))
        gone = self.lost_nodes(view) | {worst}
        left = [tuple(n for n in one if n not in gone) for one in self._pipelines]
        pipelines = self._reconfigured(left)
        if not pipelines:
            return
        pricing = Pricing(view.setting, view.health, view.layout.plan)
        plan = self._plan(pricing, pipelines)
        pause_s = view.setting.cost.transition_s(pricing.moved_bytes(plan), plan)
        if view.lost_s < pause_s:
            return
        now = self._plan(pricing, self._pipelines)
        if pricing.iteration_s(plan) < pricing.iteration_s(now) * (1 - LEAST_GAIN):
            self._dropped.add(worst)
