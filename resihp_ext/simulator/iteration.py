"""How long iterations of a layout take on devices and links as they really are.

The walk of the same programs that jobs run. Iterations differ by the documents in them; a run draws
so many different ones once and goes through them again and again, so that while nothing changes an
iteration costs nothing. Replicas that are alike are walked together.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from resihp_ext.cost.link import Link as Wire
from resihp_ext.detector.slots import Array
from resihp_ext.plan.action import END
from resihp_ext.plan.plan import Instance, Plan, Stage
from resihp_ext.simulator.graph import Graph, Part, parts, ring_left, sub_plan
from resihp_ext.simulator.health import Health, Link
from resihp_ext.simulator.layout import Layout, Schedule
from resihp_ext.simulator.setting import Setting

POOL = 64
"""Different iterations of a run."""
SETTLING = 4
"""Staggered iterations before their pace is taken."""


Kind = tuple[tuple[object, ...], tuple[float, ...]]
"""What a graph is made of, and how fast groups really are."""


@dataclass(frozen=True, slots=True)
class Look:
    """One layout on devices as they are."""

    iteration_s: Array
    """Of each iteration of the pool: shape (:data:`POOL`,)."""


class Iterations:
    """Times layouts of one setting; remembers them."""

    def __init__(self, setting: Setting, squared: Array | None = None) -> None:
        """Draws the iterations.

        Args:
            squared: Takes them from here instead; see :attr:`squared`.
        """
        self._setting = setting
        if squared is None:
            squared = self._drawn()
        self.squared: Array = squared
        """Of each micro-batch of a global batch in each iteration of the pool: the sum of squared
        segment lengths."""
        self._known: dict[tuple[object, ...], Look] = {}
        self._graphs: dict[tuple[object, ...], Graph] = {}

    def _drawn(self) -> Array:
        setting = self._setting
        rng = np.random.default_rng([setting.seed, 1])
        count, shape = setting.nominal.micro_batches, setting.shape
        sequences = shape.tokens // shape.seq_length
        drawn = setting.documents.squared(count * POOL * sequences, shape.seq_length, rng)
        return np.asarray(drawn.reshape(count, POOL, sequences).sum(axis=2))

    def look(self, layout: Layout, health: Health) -> Look:
        """Times a layout.

        Args:
            health: The truth. Ranks of the layout must be alive.
        """
        key = (layout.plan.digest, layout.schedule, health)
        if key not in self._known:
            walk = self._staggered_s if layout.schedule.staggered else self._together_s
            self._known[key] = Look(walk(layout, health))
        return self._known[key]

    def _together_s(self, layout: Layout, health: Health) -> Array:
        """All hosts meet at SYNC."""
        kinds: dict[Kind, list[Part]] = {}
        for part in parts(layout.plan):
            if part.micro_batches:
                kinds.setdefault(self._kind(layout, part, health), []).append(part)
        longest = np.zeros(POOL)
        for kind, alike in kinds.items():
            plan = sub_plan(layout.plan, alike[0])
            graph = self._graph(kind[0], layout.schedule, plan, health.left)
            squared = np.concatenate([self.squared[list(one.micro_batches)] for one in alike], 1)
            busy_s = graph.busy_s(plan, health.p, self._setting.shape.tokens, squared)
            ends_s = graph.walk.ends_s(busy_s, graph.wire_s).max(axis=0)
            longest = np.maximum(longest, ends_s.reshape(len(alike), POOL).max(axis=0))
        sync_s, step_s = self._ends_s(layout.plan, health)
        return longest + max(sync_s.values()) + max(step_s.values())

    def _staggered_s(self, layout: Layout, health: Health) -> Array:
        """Stages step on their own: the pace of many iterations after each other."""
        plan = layout.plan
        whole = Part(tuple(range(len(plan.replicas))), tuple(range(plan.micro_batches)))
        key = (plan.digest, layout.schedule, health.links)
        graph = self._graph(key, layout.schedule, plan, health.left)
        busy_s = graph.busy_s(plan, health.p, self._setting.shape.tokens, self.squared)
        sync_s, step_s = self._ends_s(sub_plan(plan, whole), health)
        tails = np.array([sync_s[host] for host in graph.walk.hosts])
        steps = np.array([step_s[host] for host in graph.walk.hosts])
        stages = [plan.stage(host).layers for host in graph.walk.hosts]
        mine = {a: np.flatnonzero([_share(a, b) for b in stages]) for a in set(stages)}
        begin, done = np.zeros(len(stages)), []
        for number in range(SETTLING + POOL):
            ends = graph.walk.ends_s(busy_s[:, number % POOL], graph.wire_s, begin)
            met = np.array([ends[mine[layers]].max() for layers in stages])
            begin = met + tails + steps
            done.append(float(begin.max()))
        # Iteration ``number`` begins where the pool does after the settling ones.
        pace = np.diff(np.array(done))[SETTLING - 1 :]
        return np.asarray(np.roll(pace, SETTLING % POOL))

    def _graph(
        self, kind: tuple[object, ...], schedule: Schedule, plan: Plan, left: Mapping[Link, float]
    ) -> Graph:
        if kind not in self._graphs:
            self._graphs[kind] = Graph(self._setting, schedule, plan, left)
        return self._graphs[kind]

    def _kind(self, layout: Layout, part: Part, health: Health) -> Kind:
        """Parts of the same kind take the same time for the same micro-batches."""
        p = health.p
        replicas = (layout.plan.replicas[one] for one in part.replicas)
        speeds = tuple(
            min(p.get(r, 1.0) for r in stage.ranks) for one in replicas for stage in one.stages
        )
        return (self._graph_key(layout, part, health.left), speeds)

    def _graph_key(
        self, layout: Layout, part: Part, left: Mapping[Link, float]
    ) -> tuple[object, ...]:
        """What a graph is made of: all but how fast devices really are."""
        plan, node_of = layout.plan, self._setting.cluster.node_of
        nodes = {node_of[rank] for one in part.replicas for rank in plan.replicas[one].ranks}
        near = tuple(sorted((link, rest) for link, rest in left.items() if set(link) <= nodes))
        if len(part.replicas) > 1:
            return (plan.digest, layout.schedule, part, near)
        believed = {one.rank: one.p for one in plan.devices}
        replica = plan.replicas[part.replicas[0]]
        # Without slow links only who shares a node matters, not which.
        origin = 0 if near else node_of[replica.ranks[0]]
        cells = tuple(
            (
                one.layers,
                min(believed[r] for r in one.ranks),
                tuple(node_of[r] - origin for r in one.ranks),
            )
            for one in replica.stages
        )
        return (layout.schedule, cells, len(part.micro_batches), near)

    def _ends_s(
        self, plan: Plan, health: Health
    ) -> tuple[dict[Instance, float], dict[Instance, float]]:
        """SYNC and STEP of every host; equal stages are asked once."""
        return Ends(self._setting, plan, health).all()


class Ends:
    """SYNC and STEP of a plan; equal stages are asked once."""

    def __init__(self, setting: Setting, plan: Plan, health: Health) -> None:
        self._setting, self._plan, self._left = setting, plan, health.left
        self._known: dict[tuple[object, ...], tuple[float, float]] = {}
        self._rings: dict[tuple[int, int], float] = {}

    def all(self) -> tuple[dict[Instance, float], dict[Instance, float]]:
        """By host."""
        sync_s, step_s = {}, {}
        for host in self._plan.hosts:
            stage = self._plan.stage(host)
            key = (stage.layers, stage.tp, self._ring(stage))
            if key not in self._known:
                self._known[key] = self._price(host, key[2])
            sync_s[host], step_s[host] = self._known[key]
        return sync_s, step_s

    def _price(self, host: Instance, left: float) -> tuple[float, float]:
        setting = self._setting
        between = setting.cost.between
        slower = Wire(latency_s=between.latency_s, bytes_per_s=between.bytes_per_s * left)
        model = replace(setting.cost, between=slower)
        price = model.of_plan(self._plan, setting.shape, policy=setting.memory)
        sync, step = (price.action_s(host, action) for action in END)
        return sync, step

    def _ring(self, stage: Stage) -> float:
        """What is left of the slowest link among the owners of the stage's layers."""
        if stage.layers not in self._rings:
            node_of = self._setting.cluster.node_of
            nodes = [
                node_of[rank]
                for replica in self._plan.replicas
                for one in replica.stages
                if _share(one.layers, stage.layers)
                for rank in one.ranks
            ]
            self._rings[stage.layers] = ring_left(nodes, self._left)
        return self._rings[stage.layers]


def _share(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two ranges of layers have one in common."""
    return a[0] < b[1] and b[0] < a[1]
