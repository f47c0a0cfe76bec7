"""What a plan will take: seconds of a step, exactly as the program's dry run has it; bytes.

Replicas that exchange no micro-batches do not wait for each other before SYNC, so a step is the
longest of its independent parts, then the slowest SYNC, then the slowest STEP. Equal parts are
timed once: of thousands of replicas only the changed ones cost anything.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from resihp_ext.plan.action import END
from resihp_ext.plan.plan import Instance, Plan, Replica, Route
from resihp_ext.scheduler.clock import Hop, StageTimes, chain_s, web_s
from resihp_ext.scheduler.problem import Problem

Orders = Mapping[int, float] | None
"""Throughputs that a schedule was made with; None: the present ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """Seconds of a step by its parts."""

    pipeline_s: float
    sync_s: float
    step_s: float

    @property
    def iteration_s(self) -> float:
        """The whole step."""
        return self.pipeline_s + self.sync_s + self.step_s


class Predictor:
    """Times plans of one problem; remembers equal parts."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._chains: dict[tuple[object, ...], float] = {}
        self._replicas: dict[Replica, tuple[tuple[StageTimes, ...], tuple[Hop, ...]]] = {}

    def predict(self, plan: Plan, order_p: Orders = None) -> Prediction:
        """Times a plan on the devices as they are now.

        Args:
            order_p: See :meth:`resihp_ext.scheduler.prices.Prices.times`.
        """
        home, crossing = _split(plan.routes)
        parts_s = [
            self.chain_s(plan.replicas[number], count, order_p) for number, count in home.items()
        ]
        if crossing:
            parts_s += [self._web_s(plan, part, order_p) for part in _webs(crossing)]
        sync_s, step_s = self.ends_s(plan)
        return Prediction(pipeline_s=max(parts_s, default=0.0), sync_s=sync_s, step_s=step_s)

    def chain_s(self, one: Replica, micro_batches: int, order_p: Orders = None) -> float:
        """Pipeline time of a replica whose micro-batches stay in it."""
        if not micro_batches:
            return 0.0
        stages, hops = self._parts(one, order_p)
        key = (stages, hops, micro_batches)
        if key not in self._chains:
            self._chains[key] = chain_s(stages, hops, micro_batches)
        return self._chains[key]

    def _parts(
        self, one: Replica, order_p: Orders
    ) -> tuple[tuple[StageTimes, ...], tuple[Hop, ...]]:
        if order_p is not None:
            return self._priced(one, order_p)
        if one not in self._replicas:
            self._replicas[one] = self._priced(one, None)
        return self._replicas[one]

    def _priced(
        self, one: Replica, order_p: Orders
    ) -> tuple[tuple[StageTimes, ...], tuple[Hop, ...]]:
        prices = self._problem.prices
        groups = [stage.ranks for stage in one.stages]
        return (
            tuple(prices.times(stage, order_p) for stage in one.stages),
            tuple(prices.hop(a, b) for a, b in pairwise(groups)),
        )

    def _web_s(self, plan: Plan, part: Sequence[Route], order_p: Orders) -> float:
        names: dict[Instance, int] = {}
        routes = [tuple(names.setdefault(one, len(names)) for one in route) for route in part]
        prices = self._problem.prices
        stages = [plan.stage(one) for one in names]
        pairs = {pair for route in routes for pair in pairwise(route)}
        hops = {(a, b): prices.hop(stages[a].ranks, stages[b].ranks) for a, b in pairs}
        return web_s([prices.times(stage, order_p) for stage in stages], routes, hops)

    def ends_s(self, plan: Plan) -> tuple[float, float]:
        """The slowest SYNC and the slowest STEP; equal stages are asked once."""
        problem = self._problem
        here = replace(plan, devices=problem.cluster.devices)
        price = problem.cost.cost(here, problem.shape, policy=problem.policy)
        kinds: dict[tuple[int, tuple[int, int]], Instance] = {}
        for number, one in enumerate(plan.replicas):
            for index, stage in enumerate(one.stages):
                key = (len(stage.ranks), stage.layers)
                if key not in kinds:
                    kinds[key] = Instance(replica=number, stage=index)
        sync, step = (max(price(one, action) for one in kinds.values()) for action in END)
        return sync, step


def _split(routes: Sequence[Route]) -> tuple[dict[int, int], list[Route]]:
    """Micro-batches of each replica that none leaves or enters, and the routes of the others."""
    homes: dict[int, frozenset[int]] = {}
    for route in routes:
        if id(route) not in homes:
            homes[id(route)] = frozenset(one.replica for one in route)
    mixed = {number for home in homes.values() if len(home) > 1 for number in home}
    counts: dict[int, int] = {}
    crossing = []
    for route in routes:
        number = route[0].replica
        if number in mixed or len(homes[id(route)]) > 1:
            crossing.append(route)
        else:
            counts[number] = counts.get(number, 0) + 1
    return counts, crossing


def _webs(routes: Sequence[Route]) -> list[list[Route]]:
    """Groups routes that share an instance, directly or through others."""
    parent: dict[Instance, Instance] = {}

    def root(one: Instance) -> Instance:
        while parent.setdefault(one, one) != one:
            parent[one] = parent[parent[one]]
            one = parent[one]
        return one

    for route in routes:
        for one in route[1:]:
            parent[root(one)] = root(route[0])
    webs: dict[Instance, list[Route]] = {}
    for route in routes:
        webs.setdefault(root(route[0]), []).append(route)
    return list(webs.values())


def in_flight(plan: Plan) -> dict[Instance, int]:
    """Most micro-batches that 1F1B can have in flight on each instance: a bound, reached where
    stages are equal."""
    limits: dict[Instance, int] = {}
    visits: dict[Instance, int] = {}
    for route in plan.routes:
        for place, one in enumerate(route):
            visits[one] = visits.get(one, 0) + 1
            limits[one] = max(limits.get(one, 0), len(route) - place)
    return {one: min(limits[one], visits[one]) for one in visits}


def memory_bytes(problem: Problem, plan: Plan) -> dict[int, int]:
    """Peak of every rank that holds a stage."""
    held, shards = in_flight(plan), len(plan.replicas)
    found: dict[int, int] = {}
    for one in plan.instances:
        stage = plan.stage(one)
        first, last = stage.layers[0] == 0, stage.layers[1] == plan.num_layers
        memory = problem.memory(stage.depth, stage.tp, first, last, shards)
        total = memory.total(held.get(one, 0))
        found.update(dict.fromkeys(stage.ranks, total))
    return found
