"""Oobleck: pipelines of several sizes made from templates; a death costs a node, never a restart.

Source: BASELINES 2 (repositories of 2023 and 2026, the artifact). Templates:
:mod:`resihp_ext.simulator.policies.oobleck_templates`. Stages are TP groups inside a node, all of
one template with the same degree, the fastest of the powers of two that divide the model. Pipelines
are any multiset of template sizes that uses all nodes, at least ``spare + 1``; micro-batches are
dealt so that the slowest pipeline is fastest (the 2026 rewrite; the artifact evens out squares).

A node with a dead device is lost whole. Its pipeline then takes the template of its new size; if
there is none it borrows nodes from the largest pipeline that can spare them, or is merged with
another; else the job waits for repair. Layers that a node lacks are copied from a replica that has
them; if nobody has, all comes from the last checkpoint. Nodes that come back: pipelines are made
anew from all nodes. Slow devices are borne.

Stronger than the source: instantiations are compared by the seconds of the planners' pipelines; the
nominal layout is one of them. Simplified: of more than ``MOST_NODES`` nodes only pipelines of equal
sizes, give or take one node, are looked at.

Parameter: ``spare``: simultaneous losses of nodes that are survived for certain (``f``).

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise

from resihp_ext.cost.layer_cost import Part
from resihp_ext.plan.plan import Plan, Replica, Stage
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policies.oobleck_templates import best_cut, step_s, sums
from resihp_ext.simulator.policies.planned import lost_layers
from resihp_ext.simulator.policy import Answer, Cause, Policy, Undone, View
from resihp_ext.simulator.pricing import Pricing
from resihp_ext.simulator.restart import read_s, restart_s
from resihp_ext.simulator.setting import Setting

SPARE = 1
MOST_NODES = 40
PRICED = 6
"""Instantiations that are timed exactly, the best by the templates' own formula."""
Cell = tuple[int, int, tuple[int, ...]]
"""A template: TP degree, stages on a node, layers of the stages."""


class Oobleck(Policy):
    """Templates, instantiation, reconfiguration."""

    name = "oobleck"

    def __init__(self, spare: int = SPARE) -> None:
        self.spare = spare
        self._pipelines: list[tuple[int, ...]] = []
        """Nodes of each, in the order of its stages."""
        self._best: dict[int, tuple[int, ...]] = {}
        """Sizes of pipelines, by the number of nodes."""

    def begin(self, setting: Setting) -> Layout:
        self._templates = Templates(setting)
        self._pipelines = self._instantiate(setting, self._all_nodes(setting))
        return Layout(plan=self._plan(Pricing(setting, self._healthy), self._pipelines))

    def answer(self, view: View) -> Answer:
        lost = self.lost_nodes(view)
        live = [node for node in self._all_nodes(view.setting) if node not in lost]
        held = {node for one in self._pipelines for node in one}
        running = view.layout
        if running is not None and held == set(live):
            return Answer(layout=running, reason="the same nodes as before")
        if running is None or held < set(live) or view.cause is Cause.BACK:
            found = self._instantiate(view.setting, live)
        else:
            found = self._reconfigured(
                [tuple(n for n in p if n not in lost) for p in self._pipelines]
            )
        if not found:
            return Answer(
                layout=None,
                undone=Undone.CHECKPOINT,
                reason=f"{len(live)} nodes are too few: waits for repair",
            )
        self._pipelines = found
        return self._changed(view, found)

    def lost_nodes(self, view: View) -> frozenset[int]:
        """Nodes that take part no more."""
        node_of = view.setting.cluster.node_of
        return frozenset(node_of[rank] for rank in view.health.dead)

    def deal(self, pricing: Pricing, replicas: Sequence[Replica]) -> list[int]:
        """Micro-batches of each pipeline, as if all devices were healthy."""
        return Pricing(pricing.setting, self._healthy).dealt(replicas)

    def _changed(self, view: View, pipelines: Sequence[tuple[int, ...]]) -> Answer:
        running = view.layout
        pricing = Pricing(view.setting, view.health, running.plan if running else None)
        plan = self._plan(pricing, pipelines)
        if running is None:
            return Answer(
                layout=Layout(plan=plan),
                pause_s=restart_s(view.setting),
                undone=Undone.CHECKPOINT,
                reason=f"started anew on {len(pipelines)} pipelines",
            )
        moved = pricing.moved_bytes(plan)
        pause_s = view.setting.cost.transition_s(moved, plan)
        undone = Undone.STEP if view.cause is Cause.DEAD else Undone.NOTHING
        if lost_layers(running.plan, view.health):
            pause_s, undone = pause_s + read_s(view.setting), Undone.CHECKPOINT
        sizes = ", ".join(str(len(one)) for one in pipelines)
        return Answer(
            layout=Layout(plan=plan),
            pause_s=pause_s,
            undone=undone,
            moved_bytes=sum(moved.values()),
            reason=f"pipelines of {sizes} nodes",
        )

    # Pipelines.

    def _instantiate(self, setting: Setting, nodes: Sequence[int]) -> list[tuple[int, ...]]:
        """The fastest pipelines from these nodes; none if they are too few."""
        sizes = self._sizes(setting, len(nodes))
        edges = [0, *accumulate(sizes)]
        return [tuple(nodes[a:b]) for a, b in pairwise(edges)]

    def _sizes(self, setting: Setting, count: int) -> tuple[int, ...]:
        """The fastest sizes; the nodes are all alike to it."""
        if count in self._best:
            return self._best[count]
        templates = self._templates
        found = [
            (templates.about_s(sizes, setting.nominal.micro_batches), sizes)
            for sizes in templates.instantiations(count, self.spare + 1)
        ]
        pricing, priced = Pricing(setting, self._healthy), []
        first = self._all_nodes(setting)[:count]
        for _, sizes in sorted(found)[:PRICED]:
            edges = [0, *accumulate(sizes)]
            plan = self._plan(pricing, [tuple(first[a:b]) for a, b in pairwise(edges)])
            priced.append((pricing.iteration_s(plan), sizes))
        self._best[count] = min(priced)[1] if priced else ()
        return self._best[count]

    def _reconfigured(self, pipelines: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        """BASELINES 2.5: simple, borrow, merge; nothing when all of these fail."""
        least = self._templates.smallest
        whole = sorted((p for p in pipelines if self._templates.of(len(p))), key=len)
        short = sorted((p for p in pipelines if p and not self._templates.of(len(p))), key=len)
        for one in reversed(short):
            needs = least - len(one)
            donor = max(whole, key=len, default=())
            if needs > 0 and len(donor) - needs >= least and self._templates.of(len(donor) - needs):
                whole.remove(donor)
                whole += [(*one, *donor[len(donor) - needs :]), donor[: len(donor) - needs]]
            else:
                other = min(whole, key=len, default=())
                if other:
                    whole.remove(other)
                whole.append((*other, *one))
        found = [p for p in whole if self._templates.of(len(p))]
        return found if len(found) == len(whole) and found else []

    def _plan(self, pricing: Pricing, pipelines: Sequence[tuple[int, ...]]) -> Plan:
        replicas = [self._templates.replica(nodes) for nodes in pipelines]
        return pricing.plan(replicas, self.deal(pricing, replicas))

    @staticmethod
    def _all_nodes(setting: Setting) -> list[int]:
        used = {rank for one in setting.nominal.replicas for rank in one.ranks}
        return sorted({one.node for one in setting.cluster.devices if one.rank in used})

    @cached_property
    def _healthy(self) -> Health:
        return Health()


class Templates:
    """The templates of one setting; they are made once."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._known: dict[int, Cell | None] = {}
        self._stages: dict[int, tuple[float, ...]] = {}
        devices = setting.cluster.devices
        self._ranks: dict[int, list[int]] = {}
        for one in devices:
            self._ranks.setdefault(one.node, []).append(one.rank)
        nodes = len(self._ranks)
        self.smallest = next((n for n in range(1, nodes + 1) if self.of(n)), nodes + 1)

    def of(self, nodes: int) -> Cell | None:
        """The fastest template for so many nodes; None if the model does not fit."""
        if nodes not in self._known:
            self._known[nodes] = self._made(nodes)
        return self._known[nodes]

    def _made(self, nodes: int) -> Cell | None:
        setting = self._setting
        each = setting.devices_per_node
        problem = setting.problem(Health(), setting.nominal)
        best: tuple[float, Cell] | None = None
        for tp in problem.valid_tps(each):
            if each % tp or tp & (tp - 1):
                continue
            stages = nodes * each // tp
            layer_s = self._layer_s(tp)

            def fits(cut: tuple[int, ...], tp: int = tp) -> bool:
                last = len(cut) - 1
                return all(
                    problem.memory(depth, tp, at == 0, at == last, 1).total(len(cut) - at)
                    <= setting.cluster.memory_bytes
                    for at, depth in enumerate(cut)
                )

            found = best_cut(layer_s, stages, 4 * stages, fits)
            if found is None:
                continue
            pace_s = found[0] / (4 * stages)
            if best is None or pace_s < best[0]:
                best = (pace_s, (tp, each // tp, found[1]))
        return best[1] if best else None

    def _layer_s(self, tp: int) -> list[float]:
        """Forward and backward of each layer; the ends with embedding and head."""
        setting, count = self._setting, self._setting.shape.num_layers

        def seconds(first: bool, last: bool) -> float:
            return sum(
                setting.cost.part_s(
                    setting.shape,
                    part,
                    layers=1,
                    tp=tp,
                    first=first,
                    last=last,
                    sequence_parallel=setting.memory.sequence_parallel,
                )
                for part in Part
            )

        return [seconds(at == 0, at == count - 1) for at in range(count)]

    def instantiations(self, nodes: int, least: int) -> Iterator[tuple[int, ...]]:
        """Sizes of pipelines that use all nodes."""
        if nodes <= MOST_NODES:
            sizes = [n for n in range(self.smallest, nodes + 1) if self.of(n)]
            yield from sums(sizes, nodes, least)
            return
        for count in range(least, nodes // self.smallest + 1):
            each, more = divmod(nodes, count)
            if self.of(each) and (not more or self.of(each + 1)):
                yield (*([each] * (count - more)), *([each + 1] * more))

    def about_s(self, sizes: Sequence[int], micro_batches: int) -> float:
        """The slowest pipeline by the templates' formula, micro-batches dealt by pace."""
        stage_s = [self._stage_s(size) for size in sizes]
        paces = [1 / max(one) for one in stage_s]
        shares = [max(1, round(micro_batches * pace / sum(paces))) for pace in paces]
        return max(step_s(one, m) for one, m in zip(stage_s, shares, strict=True))

    def _stage_s(self, size: int) -> tuple[float, ...]:
        if size not in self._stages:
            cell = self.of(size)
            assert cell is not None
            ends = [0.0, *accumulate(self._layer_s(cell[0]))]
            edges = [0, *accumulate(cell[2])]
            self._stages[size] = tuple(ends[b] - ends[a] for a, b in pairwise(edges))
        return self._stages[size]

    def replica(self, nodes: Sequence[int]) -> Replica:
        """The pipeline of a template on these nodes."""
        cell = self.of(len(nodes))
        assert cell is not None
        tp, on_node, cut = cell
        stages, at = [], 0
        for number, depth in enumerate(cut):
            ranks = self._ranks[nodes[number // on_node]]
            first = number % on_node * tp
            stages.append(Stage(ranks=tuple(ranks[first : first + tp]), layers=(at, at + depth)))
            at += depth
        return Replica(stages=tuple(stages))
