"""Labelled synthetic runs: what ranks would measure, with devices, links and hosts that slow down.

A program is walked rank by rank with the costs of a preset, on packed batches. Times are noisy,
some are odd, clocks differ. Equal seeds give equal runs.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.layer_cost import Part, TensorGroup
from resihp_ext.cost.link import Link
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.cost.plan_cost import PlanCost, Workload
from resihp_ext.detector.greyhound import Benchmarks
from resihp_ext.detector.scene import Fault, Scene, packed
from resihp_ext.detector.slots import Array, Role, overlaps
from resihp_ext.detector.timed import MicroBatch, RankStep, TimedAction
from resihp_ext.detector.wires import Wires, validated
from resihp_ext.plan.action import COMPUTE, SENDS, Action, Kind
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import Instance
from resihp_ext.plan.program import Message
from resihp_ext.plan.schedule import one_forward_one_backward

FREE = Link(latency_s=0.0, bytes_per_s=1e30)
EPOCH_S = 1.7e9
KEPT_DRIFT = 0.9
"""Part of a device's drift that is left in the next step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """One action of a host, with what the walk needs to know."""

    action: Action
    instance: Instance
    ranks: tuple[int, ...]
    message: Message | None
    ends: tuple[tuple[int, int], ...] = ()
    """Of a receive: pairs of ranks that move its pieces."""


class Run:
    """Walks a scene step by step."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.one_document = False
        """Whether every sequence is one long document."""
        self._random = Random(scene.seed + 1)
        self._numbers = np.random.default_rng(scene.seed + 1)
        shape, plan = scene.shape, scene.plan
        policy = MemoryPolicy(sequence_parallel=True)
        real = preset("a100")
        alone = replace(real, inside=FREE, between=FREE)
        self._all = PlanCost(real, plan, shape, policy)
        self._own = PlanCost(alone, plan, shape, policy)
        self._node_of = {d.rank: d.node for d in plan.devices}
        size = len(plan.devices)
        self._pace = np.exp(self._numbers.normal(0, 0.008, size))
        self._drift = self._numbers.normal(0, scene.drift, size)
        self._wires = Wires(scene, self._node_of, self._numbers)
        nodes = max(self._node_of.values()) + 1
        self._clock_s = EPOCH_S + self._numbers.normal(0, 0.5, nodes)
        self._free_s = np.zeros(size)
        # What is validated by whom must not change the run.
        self._validations = np.random.default_rng(scene.seed + 2)
        self._idle_pace = self._pace
        self._tasks = self._list_tasks()
        self._costs: dict[tuple[Instance, Kind], tuple[float, ...]] = {}

    def _list_tasks(self) -> list[_Task]:
        plan = self.scene.plan
        program = one_forward_one_backward(plan)
        tasks = []
        # Any order in which the actions can run will do.
        for span in dry_run(program, lambda _, action: 0.0 if action.peer else 1.0).spans:
            host, action = span.cell.instance, span.action
            instance, ranks = program.target(host, action), plan.stage(host).ranks
            message = program.message(host, action) if action.peer else None
            ends: tuple[tuple[int, int], ...] = ()
            if action.peer and action.kind not in SENDS:
                there = plan.stage(action.peer).ranks
                ends = tuple((there[i], ranks[j]) for i, j in overlaps(len(there), len(ranks)))
            tasks.append(
                _Task(action=action, instance=instance, ranks=ranks, message=message, ends=ends)
            )
        return tasks

    def __iter__(self) -> Iterator[tuple[int, dict[int, RankStep]]]:
        for step in range(1, self.scene.steps + 1):
            yield step, self.walk(step)

    def set_clock(self, node: int, by_s: float) -> None:
        """Sets the clock of a node."""
        self._clock_s[node] += by_s

    def batch(self) -> tuple[int, int]:
        """The next micro-batch: tokens, and the sum of squared lengths."""
        length = self.scene.shape.seq_length
        if self.one_document:
            return length, length**2
        if self.scene.shortfall:
            length = int(length * (1 - self.scene.shortfall * self._random.random()))
        return packed(self._random, length, self.scene.documents)

    def walk(self, step: int) -> dict[int, RankStep]:
        """The next step."""
        fresh = self._numbers.normal(0, self.scene.drift, len(self._drift))
        self._drift = KEPT_DRIFT * self._drift + math.sqrt(1 - KEPT_DRIFT**2) * fresh
        return _Step(self, step).records()

    def excess_s(self, fault: Fault) -> float:
        """What a slow link adds to all of its transfers in a step of full sequences."""
        tokens, total_s = self.scene.shape.seq_length, 0.0
        for task in self._tasks:
            for source, rank in task.ends:
                if {source, rank} == set(fault.ranks):
                    size = self._piece_bytes(task, tokens)
                    total_s += self._wires.usual_s(source, rank, size)
        return (fault.factor - 1) * total_s

    def benchmarks(self, ranks: Sequence[int], pairs: Sequence[tuple[int, int]]) -> Benchmarks:
        """What micro-benchmarks show of devices and links while training is paused after the last
        step: all that is slow, and little noise."""
        size = self.scene.shape.seq_length * self.scene.shape.hidden_size * 2
        times = [self._wires.usual_s(a, b, size) * self._wires.factor(a, b) for a, b in pairs]
        return Benchmarks(
            compute_s=validated(self._idle_pace[list(ranks)], self._validations),
            pair_s=validated(np.array(times), self._validations),
        )

    def _piece_bytes(self, task: _Task, tokens: int) -> float:
        share = max(len({i for i, _ in task.ends}), 1)
        return tokens * self.scene.shape.hidden_size * 2 / min(share, len(task.ranks))

    def coefficients(self, instance: Instance, kind: Kind) -> tuple[float, ...]:
        """Own and all of the work, each linear in tokens and in squares."""
        key = (instance, kind)
        if key not in self._costs:
            units = (Workload(tokens=1, squared=0), Workload(tokens=0, squared=1))
            self._costs[key] = tuple(
                self.scene.time_scale * cost.compute_s(instance, kind, unit)
                for cost in (self._own, self._all)
                for unit in units
            )
        return self._costs[key]


class _Step:
    def __init__(self, run: Run, step: int) -> None:
        scene = run.scene
        self._run, self._step = run, step
        self._work = [run.batch() for _ in scene.plan.routes]
        self._begin_s = run._free_s
        first_s = 5e-3 * scene.time_scale * np.exp(run._numbers.normal(0, scene.noise))
        self._now_s = run._free_s.copy() + first_s
        self._met_s: float | None = None
        self._sent: dict[tuple[Message, int], float] = {}
        self._done: dict[int, list[TimedAction]] = {d.rank: [] for d in scene.plan.devices}
        self._slow = np.ones(len(scene.plan.devices))
        run._wires.begin(step)
        for fault in scene.faults:
            if fault.kind != "link":
                self._slow[list(fault.ranks)] *= fault.at(step)
        run._idle_pace = run._pace * np.exp(run._drift) * self._slow
        # Now and then a device has something else to do for a step, or for an action.
        odd = run._numbers.random(len(self._slow)) < 0.001
        self._odd = np.where(odd, run._numbers.uniform(1.1, 1.8, len(self._slow)), 1.0)
        if scene.hiccups and run._numbers.random() < scene.hiccups:
            at = int(run._numbers.integers(len(self._odd)))
            self._odd[at] = run._numbers.uniform(2.0, 5.0)
        self._pace = run._idle_pace * self._odd

    def records(self) -> dict[int, RankStep]:
        self._play()
        run, plan = self._run, self._run.scene.plan
        run._free_s = self._now_s
        records = {}
        for host in plan.hosts:
            numbers = {
                m for m, route in enumerate(plan.routes) if set(route) & set(plan.chunks(host))
            }
            batches = tuple(
                MicroBatch(number=m, tokens=self._work[m][0], squared=self._work[m][1])
                for m in sorted(numbers)
            )
            for rank in plan.stage(host).ranks:
                records[rank] = RankStep(
                    rank=rank,
                    step=self._step,
                    version=plan.version,
                    begun_s=float(self._begin_s[rank] + run._clock_s[run._node_of[rank]]),
                    total_s=float(self._now_s[rank] - self._begin_s[rank]),
                    actions=tuple(self._done[rank]),
                    micro_batches=batches,
                )
        return records

    def _play(self) -> None:
        for task in self._run._tasks:
            kind = task.action.kind
            if kind in COMPUTE:
                self._compute(task)
            elif kind in SENDS:
                for rank in task.ranks:
                    assert task.message is not None
                    self._sent[task.message, rank] = float(self._now_s[rank])
                    self._record(task, rank, 2e-6, float(self._now_s[rank]) + 2e-6)
            elif kind is Kind.SYNC or kind is Kind.STEP:
                self._end(task)
            else:
                self._receive(task)

    def _noise(self, size: int) -> Array:
        noise = np.exp(self._run._numbers.normal(0, self._run.scene.noise, size))
        odd = self._run._numbers.random(size) < 0.001
        return np.where(odd, 2 * noise, noise)

    def _compute(self, task: _Task) -> None:
        tokens, squared = self._work[task.action.micro_batch]
        a, b, all_a, all_b = self._run.coefficients(task.instance, task.action.kind)
        own, ranks = a * tokens + b * squared, list(task.ranks)
        together = max(all_a * tokens + all_b * squared - own, 0.0) * float(self._noise(1)[0])
        own_s = own * self._pace[ranks] * self._noise(len(ranks))
        end_s = float((self._now_s[ranks] + own_s).max()) + together
        for rank, seconds in zip(ranks, own_s, strict=True):
            self._record(task, rank, float(seconds), end_s)

    def _receive(self, task: _Task) -> None:
        assert task.message is not None
        run = self._run
        tokens = self._work[task.action.micro_batch][0]
        size = run._piece_bytes(task, tokens)
        arrived: dict[int, float] = {}
        for source, rank in task.ends:
            wire_s = run._wires.seconds(source, rank, size, float(self._noise(1)[0]))
            at = self._sent[task.message, source] + wire_s
            arrived[rank] = max(arrived.get(rank, 0.0), at)
        for rank, at in arrived.items():
            self._record(task, rank, 2e-6, max(float(self._now_s[rank]) + 3e-6, at))

    def _end(self, task: _Task) -> None:
        run, ranks = self._run, list(task.ranks)
        if task.action.kind is Kind.STEP:
            step_s = run._all.step_s(task.instance) * run.scene.time_scale
            own_s = step_s * self._slow[ranks] * self._noise(len(ranks))
            for rank, seconds in zip(ranks, own_s, strict=True):
                self._record(task, rank, float(seconds), float(self._now_s[rank] + seconds))
            return
        if self._met_s is None:
            self._met_s = float(self._now_s.max())
        sync_s = run._all.sync_s(task.instance) * run.scene.time_scale
        end_s = self._met_s + sync_s * float(self._noise(1)[0])
        for rank in ranks:
            self._record(task, rank, 0.0, end_s)

    def _record(self, task: _Task, rank: int, own_s: float, end_s: float) -> None:
        start_s = float(self._now_s[rank])
        self._done[rank].append(
            TimedAction(
                kind=task.action.kind,
                micro_batch=task.action.micro_batch,
                chunk=task.action.chunk,
                start_s=start_s - float(self._begin_s[rank]),
                own_s=own_s,
                wait_s=max(end_s - start_s - own_s, 0.0),
            )
        )
        self._now_s[rank] = end_s


def hints_of(shape: ModelShape, tps: tuple[int, ...], model: str = "a100") -> dict[Role, Array]:
    """Coefficients of a preset by role, for :class:`MicroBatchPredictor`."""
    layers = preset(model).layers
    hints = {}
    for number, parts in enumerate(((Part.FORWARD,), (Part.INPUT, Part.WEIGHT), (Part.WEIGHT,))):
        for tp in tps:
            group = TensorGroup(tp=tp, link=FREE, sequence_parallel=True)
            found = [layers.layer(shape, group, part) for part in parts]
            hints[number, tp] = np.array(
                [
                    sum(c.alpha_s for c in found),
                    sum(c.beta_s for c in found),
                    sum(layers.embedding_s(shape, group, part) for part in parts),
                    sum(layers.head_s(shape, group, part) for part in parts),
                ]
            )
    return hints
