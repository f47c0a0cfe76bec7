"""Seconds of everything a plan does: micro-batches, transfers, reductions, steps, transitions.

A micro-batch of ``N`` tokens in segments of lengths ``l`` takes ``alpha * N + beta * sum(l ** 2)``
in a layer (the paper's predictor); backward is a part for the input and a part for the weights. The
same model prices plans for the planner, the predictor and the simulator.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resihp_ext.cost.layer_cost import Coefficients, LayerCost, Measured, MeasuredLayer, Part, Rates
from resihp_ext.cost.link import Link
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.cost.presets import FIGURES
from resihp_ext.errors import UserError
from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.dry_run import Cost
from resihp_ext.plan.plan import Instance, Plan, Stage
from resihp_ext.plan.schedule import Duration

PROFILE_FORMAT = "resihp-profile-1"

OPTIMIZER_BYTES = 30
"""Moved by Adam for each parameter: gradient, master and moments in 32 bits, all but the gradient
read and written, and the parameter written in 16 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What of a micro-batch decides its time."""

    tokens: int
    squared: int
    """Sum of the squared segment lengths."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What things cost on one kind of device and network."""

    name: str
    layers: LayerCost
    inside: Link
    """Between two devices of a node."""
    between: Link
    """Between devices of different nodes; each device has such a link of its own."""
    memory_bytes_per_s: float
    element_bytes: int
    """Of an element of activations."""
    fixed_transition_s: float

    def forward_s(
        self,
        shape: ModelShape,
        *,
        layers: int,
        tp: int,
        p: float = 1.0,
        first: bool = False,
        last: bool = False,
        tokens: int | None = None,
        squared: int | None = None,
        across_nodes: bool = False,
    ) -> float:
        """Forward of one micro-batch through some layers.

        Args:
            p: Throughput of the slowest rank.
            first: With the embedding.
            last: With output layer and loss.
            tokens: Default: a full micro-batch.
            squared: Sum of the squared segment lengths. Default: one document a sequence.
            across_nodes: Whether the tensor-parallel group spans nodes.
        """
        return self.part_s(
            shape,
            Part.FORWARD,
            layers=layers,
            tp=tp,
            p=p,
            first=first,
            last=last,
            tokens=tokens,
            squared=squared,
            across_nodes=across_nodes,
        )

    def part_s(
        self,
        shape: ModelShape,
        part: Part,
        *,
        layers: int,
        tp: int,
        p: float = 1.0,
        first: bool = False,
        last: bool = False,
        tokens: int | None = None,
        squared: int | None = None,
        across_nodes: bool = False,
    ) -> float:
        """As :meth:`forward_s`, for any part of the work."""
        if not p > 0:
            raise ValueError(f"a device with p = {p} computes nothing")
        each = self.layer(shape, tp, part, across_nodes)
        alpha_s, beta_s = layers * each.alpha_s, layers * each.beta_s
        if first:
            alpha_s += self.layers.embedding(shape, tp, part).alpha_s
        if last:
            alpha_s += self.layers.head(shape, tp, part).alpha_s
        whole = Coefficients(alpha_s=alpha_s, beta_s=beta_s)
        tokens = shape.tokens if tokens is None else tokens
        squared = shape.squared if squared is None else squared
        return whole.seconds(tokens, squared) / p

    def layer(
        self, shape: ModelShape, tp: int, part: Part, across_nodes: bool = False
    ) -> Coefficients:
        """``alpha`` and ``beta`` of one layer."""
        return self.layers.layer(shape, tp, part, self.between if across_nodes else self.inside)

    def duration(
        self,
        plan: Plan,
        shape: ModelShape,
        *,
        policy: MemoryPolicy | None = None,
        split_backward: bool = False,
    ) -> Duration:
        """Seconds of F, B and W of a full micro-batch on every instance, for the schedule."""
        price = PlanCost(self, plan, shape, policy or MemoryPolicy(), split_backward)
        return lambda instance, kind: price.compute_s(instance, kind, None)

    def cost(
        self,
        plan: Plan,
        shape: ModelShape,
        *,
        policy: MemoryPolicy | None = None,
        split_backward: bool = False,
        workloads: Sequence[Workload] | None = None,
    ) -> Cost:
        """Seconds of every action of a plan's program, for the dry run.

        Args:
            policy: Recomputation, sequence parallelism and sharding cost time, too.
            split_backward: As the program was built.
            workloads: Of each micro-batch. Default: full, one document a sequence.
        """
        return PlanCost(
            self, plan, shape, policy or MemoryPolicy(), split_backward, workloads
        ).action_s

    def transition_s(self, moved_bytes_per_rank: Mapping[int, int], plan: Plan) -> float:
        """From one plan to ``plan``, given the bytes that each rank sends or receives."""
        nodes = {device.node for device in plan.devices if device.alive}
        link = self.between if len(nodes) > 1 else self.inside
        busiest = max(moved_bytes_per_rank.values(), default=0)
        return self.fixed_transition_s + link.message_s(busiest)


class PlanCost:
    """A cost model applied to one plan; remembers what it has computed."""

    def __init__(
        self,
        model: CostModel,
        plan: Plan,
        shape: ModelShape,
        policy: MemoryPolicy,
        split_backward: bool,
        workloads: Sequence[Workload] | None = None,
    ) -> None:
        if plan.num_layers != shape.num_layers:
            raise ValueError(
                f"the plan has {plan.num_layers} layers, {shape.name} has {shape.num_layers}"
            )
        if workloads is not None and len(workloads) != plan.micro_batches:
            raise ValueError(f"{len(workloads)} workloads for {plan.micro_batches} micro-batches")
        self._model, self._plan, self._shape = model, plan, shape
        self._policy, self._split, self._workloads = policy, split_backward, workloads
        self._node_of = {device.rank: device.node for device in plan.devices}
        self._p_of = {device.rank: device.p for device in plan.devices}
        self._known: dict[tuple[object, ...], float] = {}

    def action_s(self, instance: Instance, action: Action) -> float:
        """Seconds of an action; see :class:`resihp_ext.plan.dry_run.Cost` for a transfer's."""
        peer, micro_batch = action.peer, action.micro_batch
        key = (instance, action.kind, peer, micro_batch if self._workloads is not None else 0)
        if key not in self._known:
            self._known[key] = self._action_s(instance, action.kind, peer, micro_batch)
        return self._known[key]

    def _action_s(
        self, instance: Instance, kind: Kind, peer: Instance | None, micro_batch: int
    ) -> float:
        if kind is Kind.SYNC:
            return self.sync_s(instance)
        if kind is Kind.STEP:
            return self.step_s(instance)
        if peer is None:
            return self.compute_s(instance, kind, micro_batch)
        size_bytes = self._tokens(micro_batch) * self._shape.hidden_size * self._model.element_bytes
        if kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD):
            return self.wire_s(self._plan.stage(instance), self._plan.stage(peer), size_bytes)
        return self.gather_s(self._plan.stage(peer), self._plan.stage(instance), size_bytes)

    def compute_s(self, instance: Instance, kind: Kind, micro_batch: int | None) -> float:
        """F, B or W of a micro-batch; None: a full one."""
        if micro_batch is None or self._workloads is None:
            return self._compute_s(instance, kind, None)
        return self._compute_s(instance, kind, self._workloads[micro_batch])

    def _compute_s(self, instance: Instance, kind: Kind, workload: Workload | None) -> float:
        stage = self._plan.stage(instance)
        parts = {
            Kind.FORWARD: [Part.FORWARD],
            Kind.BACKWARD: [Part.INPUT] if self._split else [Part.INPUT, Part.WEIGHT],
            Kind.WEIGHT: [Part.WEIGHT],
        }[kind]
        if self._policy.recompute and kind is Kind.BACKWARD:
            parts = [Part.FORWARD, *parts]
        return sum(
            self._model.part_s(
                self._shape,
                part,
                layers=stage.depth,
                tp=stage.tp,
                p=min(self._p_of[rank] for rank in stage.ranks),
                first=stage.layers[0] == 0,
                last=stage.layers[1] == self._plan.num_layers,
                tokens=workload.tokens if workload else None,
                squared=workload.squared if workload else None,
                across_nodes=len({self._node_of[rank] for rank in stage.ranks}) > 1,
            )
            for part in parts
        )

    def wire_s(self, sender: Stage, receiver: Stage, size_bytes: int) -> float:
        """Until one copy has crossed, in ``max`` of both degrees chunks of equal size.

        A rank of the end with fewer ranks handles several chunks, one after another.
        """
        if sender.ranks == receiver.ranks:
            return 0.0
        chunks = max(sender.tp, receiver.tp)
        each = -(-chunks // min(sender.tp, receiver.tp))
        near = all(
            self._node_of[sender.ranks[chunk * sender.tp // chunks]]
            == self._node_of[receiver.ranks[chunk * receiver.tp // chunks]]
            for chunk in range(chunks)
        )
        link = self._model.inside if near else self._model.between
        return link.message_s(each * size_bytes / chunks)

    def gather_s(self, sender: Stage, receiver: Stage, size_bytes: int) -> float:
        """The all-gather after arrival; with sequence parallelism the layer does it anyway."""
        if sender.ranks == receiver.ranks or self._policy.sequence_parallel:
            return 0.0
        return self._link(receiver.ranks).all_gather_s(size_bytes, receiver.tp)

    def sync_s(self, instance: Instance) -> float:
        """All-reduce of the instance's gradients over the replicas."""
        size_bytes = self._parameters(instance) * self._policy.grad_bytes
        owners = len(self._plan.replicas)
        return self._link(self._owners(instance)).all_reduce_s(size_bytes, owners)

    def step_s(self, instance: Instance) -> float:
        """The optimizer; if sharded, each rank does its part, then parameters are gathered."""
        parameters, owners = self._parameters(instance), len(self._plan.replicas)
        whole_s = parameters * OPTIMIZER_BYTES / self._model.memory_bytes_per_s
        if not self._policy.sharded:
            return whole_s
        link = self._link(self._owners(instance))
        return whole_s / owners + link.all_gather_s(parameters * self._policy.param_bytes, owners)

    def _parameters(self, instance: Instance) -> int:
        stage = self._plan.stage(instance)
        return self._shape.rank_parameters(
            depth=stage.depth,
            tp=stage.tp,
            first=stage.layers[0] == 0,
            last=stage.layers[1] == self._plan.num_layers,
        )

    def _owners(self, instance: Instance) -> list[int]:
        """Ranks of any replica that hold one of the instance's layers."""
        low, high = self._plan.stage(instance).layers
        return [
            rank
            for replica in self._plan.replicas
            for stage in replica.stages
            if stage.layers[0] < high and low < stage.layers[1]
            for rank in stage.ranks
        ]

    def _link(self, ranks: Sequence[int]) -> Link:
        nodes = {self._node_of[rank] for rank in ranks}
        return self._model.between if len(nodes) > 1 else self._model.inside

    def _tokens(self, micro_batch: int) -> int:
        full = self._workloads is None
        return self._shape.tokens if full else self._workloads[micro_batch].tokens  # type: ignore[index]


def preset(name: str) -> CostModel:
    """A model from published figures.

    Raises:
        UserError: no such preset.
    """
    if name not in FIGURES:
        raise UserError(f"cost model {name!r}: choose one of {', '.join(FIGURES)}, or a profile")
    f = FIGURES[name]
    memory_bytes_per_s = f.memory_bytes_per_s * f.memory_utilisation
    return CostModel(
        name=name,
        layers=Rates(
            matrix_flops=f.peak_flops * f.matrix_utilisation,
            attention_flops=f.peak_flops * f.attention_utilisation,
            memory_bytes_per_s=memory_bytes_per_s,
            element_bytes=f.element_bytes,
        ),
        inside=Link(
            latency_s=f.inside_latency_s,
            bytes_per_s=f.inside_bytes_per_s * f.network_utilisation,
        ),
        between=Link(
            latency_s=f.between_latency_s,
            bytes_per_s=f.between_bytes_per_s * f.network_utilisation,
        ),
        memory_bytes_per_s=memory_bytes_per_s,
        element_bytes=f.element_bytes,
        fixed_transition_s=f.transition_s,
    )


def from_profile(path: str | Path) -> CostModel:
    """A model from what ``resihp profile`` has measured.

    Raises:
        UserError: the file cannot be read, or is not a profile.
    """
    try:
        fields = json.loads(Path(path).read_text("utf-8"))
        if fields["format"] != PROFILE_FORMAT:
            raise ValueError(f"format {fields['format']!r} is not {PROFILE_FORMAT!r}")
        shape = ModelShape(**fields["model"])
        layers = {
            int(entry["tp"]): MeasuredLayer(
                forward=Coefficients(**entry["forward"]),
                backward=Coefficients(**entry["backward"]),
                head_forward_s=float(entry["head_forward_s"]),
                head_backward_s=float(entry["head_backward_s"]),
                embedding_s=float(entry["embedding_s"]),
            )
            for entry in fields["layers"]
        }
        return CostModel(
            name=str(fields["device"]),
            layers=Measured(shape=shape, layers=layers),
            inside=Link(**fields["inside"]),
            between=Link(**fields["between"]),
            memory_bytes_per_s=float(fields["memory_bytes_per_s"]),
            element_bytes=int(fields["element_bytes"]),
            fixed_transition_s=float(fields["fixed_transition_s"]),
        )
    except OSError as error:
        raise UserError(f"profile {path}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"profile {path}: not written by resihp profile: {error!r}") from error
