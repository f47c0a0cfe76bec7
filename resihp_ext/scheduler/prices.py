"""Seconds of stages and transfers, asked of the cost model once for each kind.

A stage or a boundary is priced on a plan that holds nothing else, so that whatever prices a whole
plan prices the search, too.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import CostModel
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.dry_run import Cost
from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Stage
from resihp_ext.scheduler.clock import Hop, Pair, StageTimes

Group = tuple[int, ...]
"""Global ranks of an instance, in the order of ``tp_rank``."""

HERE, THERE = Instance(replica=0, stage=0), Instance(replica=0, stage=1)


@dataclass(frozen=True, slots=True)
class StageKind:
    """All that decides how long a stage takes."""

    depth: int
    tp: int
    p: float
    first: bool
    last: bool
    across: bool
    """Whether its group spans nodes."""


class Prices:
    """Remembers what it was told; bound to one cluster."""

    def __init__(
        self, cost: CostModel, shape: ModelShape, policy: MemoryPolicy, cluster: Cluster
    ) -> None:
        self._cost, self._shape, self._policy = cost, shape, policy
        self._node_of = cluster.node_of
        self._p_of = {device.rank: device.p for device in cluster.devices}
        self._pairs: dict[StageKind, Pair] = {}
        self._groups: dict[Group, tuple[float, bool]] = {}
        self._hops: dict[tuple[int, tuple[int, ...]], Hop] = {}

    def pair(self, kind: StageKind) -> Pair:
        """Forward and whole backward of a micro-batch."""
        if kind not in self._pairs:
            whole = self._shape.num_layers
            low = whole - kind.depth if kind.last else int(not kind.first)
            stage = Stage(ranks=tuple(range(kind.tp)), layers=(low, low + kind.depth))
            nodes = [0, *[int(kind.across)] * (kind.tp - 1)]
            price = self._priced([stage], nodes, kind.p)
            self._pairs[kind] = (
                price(HERE, Action(kind=Kind.FORWARD, micro_batch=0)),
                price(HERE, Action(kind=Kind.BACKWARD, micro_batch=0)),
            )
        return self._pairs[kind]

    def _priced(self, stages: list[Stage], nodes: list[int], p: float = 1.0) -> Cost:
        plan = Plan(
            version=0,
            num_layers=self._shape.num_layers,
            devices=tuple(Device(rank=rank, node=node, p=p) for rank, node in enumerate(nodes)),
            replicas=(Replica(stages=tuple(stages)),),
            routes=(),
        )
        return self._cost.cost(plan, self._shape, policy=self._policy)

    def slowest(self, group: Group) -> float:
        """Least ``p`` of a group; 0.0 if one is dead."""
        return self._of(group)[0]

    def across(self, group: Group) -> bool:
        """Whether a group spans nodes."""
        return self._of(group)[1]

    def _of(self, group: Group) -> tuple[float, bool]:
        if group not in self._groups:
            nodes = {self._node_of[rank] for rank in group}
            self._groups[group] = (min(self._p_of[rank] for rank in group), len(nodes) > 1)
        return self._groups[group]

    def times(self, stage: Stage, order_p: Mapping[int, float] | None = None) -> StageTimes:
        """Seconds of a stage.

        Args:
            order_p: Throughputs that the schedule was made with, if not the present ones.
        """
        p, across = self._of(stage.ranks)
        kind = StageKind(
            stage.depth,
            stage.tp,
            p,
            stage.layers[0] == 0,
            stage.layers[1] == self._shape.num_layers,
            across,
        )
        run = self.pair(kind)
        if order_p is None:
            return StageTimes(run, run)
        assumed = min(order_p[rank] for rank in stage.ranks)
        return StageTimes(self.pair(_with_p(kind, assumed)), run)

    def hop(self, a: Group, b: Group) -> Hop:
        """Seconds of a boundary tensor between two groups, there and back."""
        # Which ranks share a node decides, not which node it is.
        names: dict[int, int] = {}
        where = tuple(names.setdefault(self._node_of[rank], len(names)) for rank in (*a, *b))
        key = (len(a), where)
        if key not in self._hops:
            two = [
                Stage(ranks=tuple(range(len(a))), layers=(0, 1)),
                Stage(ranks=tuple(range(len(a), len(where))), layers=(1, 2)),
            ]
            price = self._priced(two, list(where))

            def seconds(kind: Kind, at: Instance) -> float:
                peer = THERE if at == HERE else HERE
                return price(at, Action(kind=kind, micro_batch=0, peer=peer))

            self._hops[key] = Hop(
                (seconds(Kind.SEND_FORWARD, HERE), seconds(Kind.SEND_BACKWARD, THERE)),
                (seconds(Kind.RECV_FORWARD, THERE), seconds(Kind.RECV_BACKWARD, HERE)),
            )
        return self._hops[key]


def _with_p(kind: StageKind, p: float) -> StageKind:
    return StageKind(kind.depth, kind.tp, p, kind.first, kind.last, kind.across)
