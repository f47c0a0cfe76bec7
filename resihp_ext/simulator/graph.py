"""Replicas that exchange micro-batches, and the graph of what they do in a step.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from resihp_ext.cost.plan_cost import PlanCost, Workload
from resihp_ext.detector.itp import Walk
from resihp_ext.detector.slots import Array, Ints, overlaps
from resihp_ext.plan.action import Action
from resihp_ext.plan.plan import Instance, Plan, Stage
from resihp_ext.simulator.health import Link
from resihp_ext.simulator.layout import Schedule
from resihp_ext.simulator.setting import Setting

UNITS = (Workload(tokens=1, squared=0), Workload(tokens=0, squared=1))


@dataclass(frozen=True, slots=True)
class Part:
    """Replicas that no micro-batch leaves."""

    replicas: tuple[int, ...]
    micro_batches: tuple[int, ...]
    """That they run, by number in the global batch."""


def parts(plan: Plan) -> list[Part]:
    """The plan cut into as many parts as possible, in the order of their first replicas."""
    leader = list(range(len(plan.replicas)))

    def find(one: int) -> int:
        while leader[one] != one:
            leader[one] = leader[leader[one]]
            one = leader[one]
        return one

    for route in plan.routes:
        first = find(route[0].replica)
        for visit in route[1:]:
            other = find(visit.replica)
            leader[max(first, other)] = first = min(first, other)
    members: dict[int, list[int]] = {}
    for replica in range(len(leader)):
        members.setdefault(find(replica), []).append(replica)
    mine: dict[int, list[int]] = {one: [] for one in members}
    for number, route in enumerate(plan.routes):
        mine[find(route[0].replica)].append(number)
    return [Part(tuple(members[one]), tuple(mine[one])) for one in members]


def sub_plan(plan: Plan, part: Part) -> Plan:
    """The plan of a part alone; replicas and micro-batches are numbered anew."""
    number = {replica: i for i, replica in enumerate(part.replicas)}
    routes = tuple(
        tuple(replace(visit, replica=number[visit.replica]) for visit in plan.routes[m])
        for m in part.micro_batches
    )
    return replace(plan, replicas=tuple(plan.replicas[r] for r in part.replicas), routes=routes)


class Graph:
    """The walk of one part, and what decides its seconds."""

    def __init__(
        self, setting: Setting, schedule: Schedule, plan: Plan, left: Mapping[Link, float]
    ) -> None:
        """Builds the program and prices it.

        Args:
            plan: Of the part; its devices as fast as their owner believes.
            left: Of links that are slow.
        """
        self._plan = plan
        cost = setting.cost.of_plan(
            plan, setting.shape, policy=setting.memory, split_backward=schedule.split
        )
        program = schedule.build(plan, cost.full_micro_batch_s)
        first, count = {}, 0
        for host, actions in program.lists:
            first[host] = count
            count += len(actions)
        self.walk = Walk(program, first)
        nodes = [(host, action) for host, actions in program.lists for action in actions]
        self._targets = [program.target(host, action) for host, action in nodes]
        self._actions = [action for _, action in nodes]
        healthy = replace(
            plan, devices=tuple(replace(d, p=1.0 if d.alive else 0.0) for d in plan.devices)
        )
        # Alpha and beta of a healthy device: who computes how fast is a matter of the moment.
        own = setting.cost.of_plan(
            healthy, setting.shape, policy=setting.memory, split_backward=schedule.split
        )
        self._price(setting, own, left)

    def _price(self, setting: Setting, cost: PlanCost, left: Mapping[Link, float]) -> None:
        work, receive = self.walk.work, self.walk.receive
        steps = len(work)
        self._alpha_s, self._beta_s = np.zeros(steps), np.zeros(steps)
        self._fixed_s, self.wire_s = np.zeros(steps), np.zeros(steps)
        self._micro_batch: Ints = np.zeros(steps, dtype=np.int64)
        self._instance: list[Instance | None] = [None] * steps
        known: dict[tuple[object, ...], tuple[float, float]] = {}
        wires = _Wires(setting, cost, self._plan, left)
        for step in range(steps):
            if work[step] >= 0:
                instance, action = self._targets[work[step]], self._actions[work[step]]
                key = (instance, action.kind)
                if key not in known:
                    alpha, beta = (cost.compute_s(instance, action.kind, unit) for unit in UNITS)
                    known[key] = (alpha, beta)
                self._alpha_s[step], self._beta_s[step] = known[key]
                self._micro_batch[step] = action.micro_batch
                self._instance[step] = instance
            if receive[step] >= 0:
                instance, action = self._targets[receive[step]], self._actions[receive[step]]
                self.wire_s[step], self._fixed_s[step] = wires.seconds(instance, action)

    def busy_s(self, plan: Plan, p: Mapping[int, float], tokens: int, squared: Array) -> Array:
        """Seconds of all steps.

        Args:
            plan: Of a part of the same kind as the one that the graph was made of.
            p: Of devices that are not healthy, as they really are.
            tokens: Of a micro-batch.
            squared: Sums of squared lengths: shape (micro-batches, iterations).

        Returns:
            Shape (steps, iterations).
        """
        # A group is as fast as its slowest member.
        speed = {
            one: min(p.get(rank, 1.0) for rank in plan.stage(one).ranks) for one in plan.instances
        }
        slow = np.array([1.0 if one is None else 1 / speed[one] for one in self._instance])
        linear = self._alpha_s * tokens * slow + self._fixed_s
        busy: Array = (self._beta_s * slow)[:, None] * squared[self._micro_batch]
        busy += linear[:, None]
        return busy


class _Wires:
    """Messages between stages, some over slow links."""

    def __init__(
        self, setting: Setting, cost: PlanCost, plan: Plan, left: Mapping[Link, float]
    ) -> None:
        self._setting, self._cost, self._plan, self._left = setting, cost, plan, left
        self._node_of = setting.cluster.node_of
        self._bytes = setting.shape.tokens * setting.shape.hidden_size * setting.cost.element_bytes
        self._known: dict[tuple[Instance, Instance], tuple[float, float]] = {}

    def seconds(self, instance: Instance, receive: Action) -> tuple[float, float]:
        """On the wire, and of the all-gather after it."""
        assert receive.peer is not None
        key = (receive.peer, instance)
        if key not in self._known:
            here, there = self._plan.stage(receive.peer), self._plan.stage(instance)
            wire_s = self._cost.wire_s(here, there, self._bytes)
            latency_s = min(self._setting.cost.between.latency_s, wire_s)
            wire_s = latency_s + (wire_s - latency_s) / self._least(here, there)
            self._known[key] = (wire_s, self._cost.gather_s(here, there, self._bytes))
        return self._known[key]

    def _least(self, here: Stage, there: Stage) -> float:
        """Of the links that pieces pass, the slowest."""
        if not self._left:
            return 1.0
        pairs = overlaps(here.tp, there.tp)
        nodes = ((self._node_of[here.ranks[i]], self._node_of[there.ranks[j]]) for i, j in pairs)
        return min(self._left.get((min(a, b), max(a, b)), 1.0) for a, b in nodes)


def ring_left(nodes: Sequence[int], left: Mapping[Link, float]) -> float:
    """What is left of the slowest link of a ring over nodes in ascending order."""
    ring = sorted(set(nodes))
    if not left or len(ring) < 2:
        return 1.0
    pairs = [*pairwise(ring), (ring[0], ring[-1])]
    return min(left.get(pair, 1.0) for pair in pairs)
