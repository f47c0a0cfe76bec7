"""What policies expect plans to take: the planners' prices, with slow links.

The paces of pipelines are those of :mod:`resihp_ext.scheduler.predict`, full micro-batches, 1F1B;
boundary tensors and reductions over slow links take longer, as in the simulated iterations.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from resihp_ext.detector.slots import overlaps
from resihp_ext.plan.plan import Plan, Replica
from resihp_ext.scheduler.clock import Hop, StageTimes
from resihp_ext.scheduler.layouts import straight_routes
from resihp_ext.scheduler.maps import bounds_of
from resihp_ext.scheduler.movement import lacking_bytes
from resihp_ext.scheduler.predict import Predictor, memory_bytes
from resihp_ext.scheduler.prices import Group
from resihp_ext.scheduler.shares import Share, balanced_shares, dealt_counts
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.iteration import Ends
from resihp_ext.simulator.setting import Setting

Parts = tuple[tuple[StageTimes, ...], tuple[Hop, ...]]
"""All that decides how fast a replica is."""


class Pricing:
    """Prices of one setting on devices and links as they are known; remembers what it was asked."""

    def __init__(self, setting: Setting, health: Health, current: Plan | None = None) -> None:
        self.setting, self.health = setting, health
        self.problem = setting.problem(health, current or setting.nominal)
        self._predictor = Predictor(self.problem)
        self._left, self._node_of = health.left, setting.cluster.node_of
        self._parts: dict[Replica, Parts] = {}
        self._hops: dict[tuple[Hop, float], Hop] = {}

    # Replicas.

    def parts(self, one: Replica) -> Parts:
        """Times of the stages of a replica, and of the hops between them."""
        if one not in self._parts:
            prices = self.problem.prices
            groups = [stage.ranks for stage in one.stages]
            self._parts[one] = (
                tuple(prices.times(stage) for stage in one.stages),
                tuple(self._hop(a, b) for a, b in pairwise(groups)),
            )
        return self._parts[one]

    def _hop(self, a: Group, b: Group) -> Hop:
        hop = self.problem.prices.hop(a, b)
        if not self._left:
            return hop
        paths = ((self._node_of[a[i]], self._node_of[b[j]]) for i, j in overlaps(len(a), len(b)))
        left = min(self._left.get((min(pair), max(pair)), 1.0) for pair in paths)
        if (hop, left) not in self._hops:
            latency_s = self.setting.cost.between.latency_s
            wire = tuple(min(latency_s, s) + max(0.0, s - latency_s) / left for s in hop.wire)
            self._hops[hop, left] = replace(hop, wire=(wire[0], wire[1]))
        return self._hops[hop, left]

    def chain_s(self, one: Replica, micro_batches: int) -> float:
        """Pipeline time of a replica whose micro-batches stay in it."""
        stages, hops = self.parts(one)
        return self._predictor.timed(stages, hops, micro_batches) if micro_batches else 0.0

    # Micro-batches.

    def dealt(self, replicas: Sequence[Replica], least: int = 1) -> list[int]:
        """The integer shares whose slowest replica is fastest, at least so many each.

        Exact: the time of a replica grows with its micro-batches, so a split from whose slowest
        replica none can be taken without making another one as slow is best
        (:func:`resihp_ext.scheduler.shares.balanced_shares`).
        """
        total = self.setting.nominal.micro_batches
        least = min(least, total // len(replicas))
        alike: dict[Parts, list[int]] = {}
        for number, one in enumerate(replicas):
            alike.setdefault(self.parts(one), []).append(number)
        shares = [
            self._share(replicas[numbers[0]], len(numbers), least) for numbers in alike.values()
        ]
        rest = total - least * len(replicas)
        counts = [least] * len(replicas)
        if rest:
            most, _ = balanced_shares(shares, rest)
            dealt = dealt_counts(shares, most, rest)
            for numbers, mine in zip(alike.values(), dealt, strict=True):
                for number, more in zip(numbers, mine, strict=True):
                    counts[number] += more
        return counts

    def _share(self, one: Replica, count: int, least: int) -> Share:
        bounds = bounds_of([times.run for times in self.parts(one)[0]])

        def seconds(micro_batches: int) -> float:
            return self.chain_s(one, micro_batches + least)

        def about_s(micro_batches: int) -> float:
            return max(bound.at_least_s(micro_batches + least) for bound in bounds)

        return Share(count, seconds, about_s, max(sum(bound.pair) for bound in bounds))

    def evenly(self, replicas: Sequence[Replica]) -> list[int]:
        """Equal shares, as far as they can be."""
        total, count = self.setting.nominal.micro_batches, len(replicas)
        return [total // count + (number < total % count) for number in range(count)]

    # Plans.

    def plan(self, replicas: Sequence[Replica], counts: Sequence[int]) -> Plan:
        """The plan of replicas with their shares; the nominal one, if it is that."""
        nominal = self.setting.nominal
        if tuple(replicas) == nominal.replicas and list(counts) == counts_of(nominal):
            return nominal
        return replace(
            nominal,
            devices=self.health.on(self.setting.cluster.devices),
            replicas=tuple(replicas),
            routes=straight_routes(replicas, counts),
        ).validated()

    def iteration_s(self, plan: Plan) -> float:
        """Seconds of a step of a plan whose micro-batches stay in their replicas."""
        counts = counts_of(plan)
        pairs = zip(plan.replicas, counts, strict=True)
        pipeline_s = max(self.chain_s(one, m) for one, m in pairs)
        sync_s, step_s = Ends(self.setting, plan, self.health).all()
        return pipeline_s + max(sync_s.values()) + max(step_s.values())

    def fits(self, plan: Plan) -> bool:
        """Whether every rank has memory for its part."""
        there = self.setting.cluster.memory_bytes
        return max(memory_bytes(self.problem, plan).values()) <= there

    def moved_bytes(self, plan: Plan) -> dict[int, int]:
        """What ranks lack of their part, from the current plan on."""
        return lacking_bytes(self.problem, plan)

    def move_s(self, plan: Plan) -> float:
        """How long it takes to get there in running processes."""
        return self.setting.cost.transition_s(self.moved_bytes(plan), plan)


def counts_of(plan: Plan) -> list[int]:
    """Micro-batches of each replica."""
    counts = [0] * len(plan.replicas)
    for route in plan.routes:
        counts[route[0].replica] += 1
    return counts


def used(plan: Plan) -> frozenset[int]:
    """Ranks that hold a stage."""
    return frozenset(rank for one in plan.replicas for rank in one.ranks)
