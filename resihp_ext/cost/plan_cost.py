"""A cost model applied to one plan: seconds of every action of every instance.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from resihp_ext.cost.layer_cost import Part
from resihp_ext.cost.link import Link
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.plan.action import SENDS, Action, Kind
from resihp_ext.plan.plan import Instance, Plan, Stage

if TYPE_CHECKING:
    from resihp_ext.cost.cost_model import CostModel


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What of a micro-batch decides its time."""

    tokens: int
    squared: int
    """Sum of the squared segment lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """Some consecutive layers on one tensor-parallel group."""

    layers: int
    tp: int
    p: float = 1.0
    """Throughput of the slowest rank."""
    first: bool = False
    """With the embedding."""
    last: bool = False
    """With output layer and loss."""
    across_nodes: bool = False
    sequence_parallel: bool = False


class PlanCost:
    """Prices of one plan; remembers what it has computed."""

    def __init__(
        self,
        model: CostModel,
        plan: Plan,
        shape: ModelShape,
        policy: MemoryPolicy,
        split_backward: bool = False,
        workloads: Sequence[Workload] | None = None,
    ) -> None:
        """Looks at a plan.

        Raises:
            ValueError: the plan is not one of this model, or not of these workloads.
        """
        if plan.num_layers != shape.num_layers:
            raise ValueError(
                f"the plan has {plan.num_layers} layers, {shape.name} has {shape.num_layers}"
            )
        if workloads is not None and len(workloads) != plan.micro_batches:
            raise ValueError(f"{len(workloads)} workloads for {plan.micro_batches} micro-batches")
        self._model, self._plan, self._shape, self._policy = model, plan, shape, policy
        self._split, self._workloads = split_backward, workloads
        self._full = Workload(tokens=shape.tokens, squared=shape.squared)
        self._node_of = {device.rank: device.node for device in plan.devices}
        self._p_of = {device.rank: device.p for device in plan.devices}
        self._sections: dict[Instance, Section] = {}
        self._known: dict[tuple[object, ...], float] = {}
        self._owner_links: dict[tuple[int, int], Link] = {}

    def full_micro_batch_s(self, instance: Instance, kind: Kind) -> float:
        """F, B or W of a micro-batch of full length."""
        key = (instance, kind)
        if key not in self._known:
            self._known[key] = self.compute_s(instance, kind, self._full)
        return self._known[key]

    def action_s(self, instance: Instance, action: Action) -> float:
        """Any action. A send lasts until its tensor has arrived; a receive gathers it."""
        # Micro-batches differ only where their workloads do.
        micro_batch = 0 if self._workloads is None else action.micro_batch
        key = (instance, action.kind, action.peer, micro_batch)
        if key not in self._known:
            self._known[key] = self._action_s(instance, action)
        return self._known[key]

    def _action_s(self, instance: Instance, action: Action) -> float:
        if action.kind is Kind.SYNC:
            return self.sync_s(instance)
        if action.kind is Kind.STEP:
            return self.step_s(instance)
        full = self._workloads is None
        work = self._full if full else self._workloads[action.micro_batch]  # type: ignore[index]
        if action.peer is None:
            return self.compute_s(instance, action.kind, work)
        size_bytes = work.tokens * self._shape.hidden_size * self._model.element_bytes
        here, there = self._plan.stage(instance), self._plan.stage(action.peer)
        if action.kind in SENDS:
            return self.wire_s(here, there, size_bytes)
        return self.gather_s(there, here, size_bytes)

    def compute_s(self, instance: Instance, kind: Kind, work: Workload) -> float:
        """F, B or W of one micro-batch."""
        parts = {
            Kind.FORWARD: [Part.FORWARD],
            Kind.BACKWARD: [Part.INPUT] if self._split else [Part.INPUT, Part.WEIGHT],
            Kind.WEIGHT: [Part.WEIGHT],
        }[kind]
        if self._policy.recompute and kind is Kind.BACKWARD:
            parts = [Part.FORWARD, *parts]
        section = self.section(instance)
        return sum(self._model.section_s(self._shape, part, section, work) for part in parts)

    def section(self, instance: Instance) -> Section:
        """What an instance computes, on what."""
        if instance not in self._sections:
            stage = self._plan.stage(instance)
            self._sections[instance] = Section(
                layers=stage.depth,
                tp=stage.tp,
                p=min(self._p_of[rank] for rank in stage.ranks),
                first=stage.layers[0] == 0,
                last=stage.layers[1] == self._plan.num_layers,
                across_nodes=len({self._node_of[rank] for rank in stage.ranks}) > 1,
                sequence_parallel=self._policy.sequence_parallel,
            )
        return self._sections[instance]

    def wire_s(self, sender: Stage, receiver: Stage, size_bytes: int) -> float:
        """One copy, cut at the edges of both ends' equal shares, each piece over its own link.

        A rank of the end with fewer ranks has several pieces, one after another.
        """
        if sender.ranks == receiver.ranks:
            return 0.0
        near = all(
            self._node_of[one] == self._node_of[other]
            for i, one in enumerate(sender.ranks)
            for j, other in enumerate(receiver.ranks)
            # Share i of the sender and share j of the receiver overlap.
            if i * receiver.tp < (j + 1) * sender.tp and j * sender.tp < (i + 1) * receiver.tp
        )
        link = self._model.inside if near else self._model.between
        return link.message_s(size_bytes / min(sender.tp, receiver.tp))

    def gather_s(self, sender: Stage, receiver: Stage, size_bytes: int) -> float:
        """The all-gather after arrival; with sequence parallelism the layer does it anyway."""
        if sender.ranks == receiver.ranks or self._policy.sequence_parallel:
            return 0.0
        return self._link(receiver.ranks).all_gather_s(size_bytes, receiver.tp)

    def sync_s(self, host: Instance) -> float:
        """All-reduce over the replicas of the gradients of all that the host's ranks hold."""
        replicas = len(self._plan.replicas)
        return sum(
            self._owner_link(chunk).all_reduce_s(
                self._parameters(chunk) * self._policy.grad_bytes, replicas
            )
            for chunk in self._plan.chunks(host)
        )

    def step_s(self, host: Instance) -> float:
        """The optimizer; if sharded, each rank does its part and parameters are gathered."""
        return sum(self._chunk_step_s(chunk) for chunk in self._plan.chunks(host))

    def _chunk_step_s(self, instance: Instance) -> float:
        parameters, replicas = self._parameters(instance), len(self._plan.replicas)
        if not self._policy.sharded:
            return parameters * self._model.step_parameter_s
        size_bytes = parameters * self._policy.param_bytes
        gather_s = self._owner_link(instance).all_gather_s(size_bytes, replicas)
        return parameters / replicas * self._model.step_parameter_s + gather_s

    def _parameters(self, instance: Instance) -> int:
        section = self.section(instance)
        return self._shape.rank_parameters(
            depth=section.layers, tp=section.tp, first=section.first, last=section.last
        )

    def _owner_link(self, instance: Instance) -> Link:
        """The slowest link among all ranks that hold one of the instance's layers."""
        low, high = layers = self._plan.stage(instance).layers
        if layers not in self._owner_links:
            self._owner_links[layers] = self._link(
                rank
                for replica in self._plan.replicas
                for stage in replica.stages
                if stage.layers[0] < high and low < stage.layers[1]
                for rank in stage.ranks
            )
        return self._owner_links[layers]

    def _link(self, ranks: Iterable[int]) -> Link:
        nodes = {self._node_of[rank] for rank in ranks}
        return self._model.between if len(nodes) > 1 else self._model.inside
