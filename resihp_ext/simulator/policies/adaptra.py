"""Adaptra (PipeMorph): a zero-bubble pipeline whose warm-ups make up for slow links between stages.

Source: BASELINES 4, from PipeMorph's repository: :mod:`resihp_ext.simulator.zero_bubble`. Of
several warm-ups (the default's even ones, and the closed form for parts of the delays) the best is
taken by a run on a clock, for every replica; so the schedule is never worse than the default one.
PipeMorph has an exact integer program for small cases, which is left out. Schedules change between
two iterations without a pause. The verdict on links is Greyhound's.

Slow devices, and slow links that carry reductions: nothing. Deaths:
:mod:`resihp_ext.simulator.policies.restarting`, with equal shares.

Room for activations is what memory leaves on each stage, counted from F to W.
Parameter: ``lifetime_s``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from resihp_ext.cost.link import Link as Wire
from resihp_ext.detector.slots import overlaps
from resihp_ext.plan.action import END, Kind
from resihp_ext.plan.fifo import received_in_order
from resihp_ext.plan.plan import Instance, Plan, PlanError, Replica, Stage
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import Duration, with_transfers
from resihp_ext.simulator.health import Link
from resihp_ext.simulator.layout import Layout, Schedule
from resihp_ext.simulator.policies.restarting import Restarting
from resihp_ext.simulator.policy import Answer, Sense, View
from resihp_ext.simulator.pricing import Pricing
from resihp_ext.simulator.zero_bubble import zero_bubble


class Adaptra(Restarting):
    """Zero-bubble schedules."""

    name = "adaptra"
    sense = Sense.RAW

    def deal(self, pricing: Pricing, replicas: Sequence[Replica]) -> list[int]:
        """Equally: it has no shares by speed."""
        return pricing.evenly(replicas)

    def schedule(self, pricing: Pricing, plan: Plan) -> Schedule:
        """For links as they are."""
        setting = pricing.setting
        build = ZeroBubble(
            inside=setting.cost.inside,
            between=setting.cost.between,
            tensor_bytes=setting.shape.tokens
            * setting.shape.hidden_size
            * setting.cost.element_bytes,
            left=pricing.health.links,
            rooms=_rooms(pricing, plan),
        )
        return Schedule(name="zero-bubble", build=build, split=True)

    def about_slowness(self, view: View, pricing: Pricing, running: Layout) -> Answer:
        schedule = self.schedule(pricing, running.plan)
        if schedule == running.schedule:
            return Answer(layout=running, reason="links between stages are as they were")
        return Answer(
            layout=Layout(plan=running.plan, schedule=schedule),
            reason=f"warm-ups for {len(pricing.health.links)} slow links",
        )


def _rooms(pricing: Pricing, plan: Plan) -> tuple[tuple[Stage, int], ...]:
    """Activations for which a stage like these has memory, whoever its ranks are."""
    setting, problem = pricing.setting, pricing.problem
    there, shards = setting.cluster.memory_bytes, len(plan.replicas)
    found: dict[Stage, int] = {}
    for one in plan.replicas:
        for stage in one.stages:
            kind = _kind(stage)
            if kind in found:
                continue
            first, last = stage.layers[0] == 0, stage.layers[1] == setting.shape.num_layers
            memory = problem.memory(stage.depth, stage.tp, first, last, shards)
            free = there - memory.static - memory.transient
            found[kind] = max(1, min(free // memory.activations, setting.nominal.micro_batches))
    return tuple(found.items())


def _kind(stage: Stage) -> Stage:
    """Equal for stages with equal layers and degrees."""
    return Stage(ranks=tuple(range(stage.tp)), layers=stage.layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroBubble:
    """Builds the program of a plan whose micro-batches stay in their replicas."""

    inside: Wire
    between: Wire
    tensor_bytes: int
    """Of a micro-batch between two stages."""
    left: tuple[tuple[Link, float], ...]
    """Of slow links."""
    rooms: tuple[tuple[Stage, int], ...]
    """Activations that fit, of stages like these."""

    def __call__(self, plan: Plan, duration: Duration) -> Program:
        """Raises:
        PlanError: micro-batches cross replicas, or ranks hold several stages.
        """
        mine: dict[int, list[int]] = {number: [] for number in range(len(plan.replicas))}
        for micro_batch, route in enumerate(plan.routes):
            if len({one.replica for one in route}) > 1:
                raise PlanError("zero bubble: micro-batches must stay in their replicas")
            mine[route[0].replica].append(micro_batch)
        if len(plan.hosts) < len(plan.instances):
            raise PlanError("zero bubble: no virtual stages")
        lists = []
        for number, one in enumerate(plan.replicas):
            orders = self._orders(plan, number, one, mine[number], duration)
            for place, order in enumerate(orders):
                host = Instance(replica=number, stage=place)
                tasks = [(kind, mine[number][m], host) for kind, m in order]
                lists.append((host, (*with_transfers(plan, tasks), *END)))
        return received_in_order(Program(lists=tuple(lists)))

    def _orders(
        self, plan: Plan, number: int, one: Replica, mine: list[int], duration: Duration
    ) -> Sequence[list[tuple[Kind, int]]]:
        if not mine:
            return [[] for _ in one.stages]
        hosts = [Instance(replica=number, stage=place) for place in range(len(one.stages))]
        times = [
            (
                duration(host, Kind.FORWARD),
                duration(host, Kind.BACKWARD),
                duration(host, Kind.WEIGHT),
            )
            for host in hosts
        ]
        node_of = {device.rank: device.node for device in plan.devices}
        delays_s = [self.delay_s(a, b, node_of) for a, b in pairwise(one.stages)]
        known = dict(self.rooms)
        rooms = [known.get(_kind(stage), len(one.stages)) for stage in one.stages]
        return zero_bubble(times, delays_s, rooms, len(mine)).orders

    def delay_s(self, here: Stage, there: Stage, node_of: dict[int, int]) -> float:
        """Of a boundary tensor: one copy, the slowest piece of it."""
        left = dict(self.left)
        size_bytes = self.tensor_bytes / min(here.tp, there.tp)
        slowest_s = 0.0
        for i, j in overlaps(here.tp, there.tp):
            a, b = node_of[here.ranks[i]], node_of[there.ranks[j]]
            wire = self.inside if a == b else self.between
            part = left.get((min(a, b), max(a, b)), 1.0)
            slow_s = wire.latency_s + (wire.message_s(size_bytes) - wire.latency_s) / part
            slowest_s = max(slowest_s, slow_s)
        return slowest_s
