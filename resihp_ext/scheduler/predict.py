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
from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Route, Stage
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
        pipeline_s = self.pipeline_s(plan.replicas, plan.routes, order_p)
        sync_s, step_s = self.ends_s(plan)
        return Prediction(pipeline_s=pipeline_s, sync_s=sync_s, step_s=step_s)

    def pipeline_s(
        self, replicas: Sequence[Replica], routes: Sequence[Route], order_p: Orders = None
    ) -> float:
        """Until the last replica comes to SYNC."""
        home, crossing = _split(routes)
        parts_s = [self.chain_s(replicas[number], m, order_p) for number, m in home.items()]
        if crossing:
            parts_s += [self._web_s(replicas, part, order_p) for part in _webs(crossing)]
        return max(parts_s, default=0.0)

    def chain_s(self, one: Replica, micro_batches: int, order_p: Orders = None) -> float:
        """Pipeline time of a replica whose micro-batches stay in it."""
        if not micro_batches:
            return 0.0
        stages, hops = self.parts(one) if order_p is None else self._priced(one, order_p)
        return self.timed(stages, hops, micro_batches)

    def timed(
        self, stages: tuple[StageTimes, ...], hops: tuple[Hop, ...], micro_batches: int
    ) -> float:
        """Pipeline time of one replica, by the times of its parts."""
        key = (stages, hops, micro_batches)
        if key not in self._chains:
            self._chains[key] = chain_s(stages, hops, micro_batches)
        return self._chains[key]

    def parts(self, one: Replica) -> tuple[tuple[StageTimes, ...], tuple[Hop, ...]]:
        """Times of the stages of a replica, and of the hops between them."""
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

    def _web_s(self, replicas: Sequence[Replica], part: Sequence[Route], order_p: Orders) -> float:
        names: dict[Instance, int] = {}
        routes = [tuple(names.setdefault(one, len(names)) for one in route) for route in part]
        prices = self._problem.prices
        stages = [replicas[one.replica].stages[one.stage] for one in names]
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


class Ends:
    """About the time of SYNC and STEP: both grow with the rank that holds most. Taken from replicas
    of one rank each, on which the whole model would lie; latencies become a little too short."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        shape = problem.shape
        self._whole = shape.rank_parameters(depth=shape.num_layers, tp=1, first=True, last=True)
        self._seconds: dict[tuple[int, bool], float] = {}

    def about_s(self, parameters: int, replicas: int, *, apart: bool) -> float:
        """With so many elements on the rank that holds most.

        Args:
            apart: Whether owners of the same layers lie on different nodes.
        """
        key = (replicas, apart)
        if key not in self._seconds:
            self._seconds[key] = self._whole_s(replicas, apart)
        return self._seconds[key] * parameters / self._whole

    def _whole_s(self, replicas: int, apart: bool) -> float:
        problem = self._problem
        layers = (0, problem.shape.num_layers)
        ranks = range(replicas)
        plan = Plan(
            version=0,
            num_layers=problem.shape.num_layers,
            devices=tuple(Device(rank=rank, node=rank if apart else 0) for rank in ranks),
            replicas=tuple(Replica(stages=(Stage(ranks=(r,), layers=layers),)) for r in ranks),
            routes=(),
        )
        price = problem.cost.cost(plan, problem.shape, policy=problem.policy)
        return sum(price(Instance(replica=0, stage=0), action) for action in END)


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


def in_flight(plan: Plan) -> dict[tuple[int, int], int]:
    """Most micro-batches that 1F1B can have in flight on each instance, as (replica, stage): a
    bound, reached where stages are equal."""
    times: dict[int, int] = {}
    for route in plan.routes:
        times[id(route)] = times.get(id(route), 0) + 1
    limits: dict[tuple[int, int], int] = {}
    visits: dict[tuple[int, int], int] = {}
    for route in {id(route): route for route in plan.routes}.values():
        for place, one in enumerate(route):
            key = (one.replica, one.stage)
            visits[key] = visits.get(key, 0) + times[id(route)]
            limits[key] = max(limits.get(key, 0), len(route) - place)
    return {key: min(limits[key], visits[key]) for key in visits}


def memory_bytes(problem: Problem, plan: Plan) -> dict[int, int]:
    """Peak of every rank that holds a stage."""
    held, shards = in_flight(plan), len(plan.replicas)
    found: dict[int, int] = {}
    for number, one in enumerate(plan.replicas):
        for place, stage in enumerate(one.stages):
            first, last = stage.layers[0] == 0, stage.layers[1] == plan.num_layers
            memory = problem.memory(stage.depth, len(stage.ranks), first, last, shards)
            found.update(dict.fromkeys(stage.ranks, memory.total(held.get((number, place), 0))))
    return found
