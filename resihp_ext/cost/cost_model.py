"""Seconds of everything a plan does: micro-batches, transfers, reductions, steps, transitions.

A micro-batch of ``N`` tokens in segments of lengths ``l`` takes ``alpha * N + beta * sum(l ** 2)``
in a layer (the paper's predictor); backward is a part for the input and a part for the weights. The
same model prices plans for the planner, the predictor and the simulator.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resihp_ext.cost.layer_cost import Coefficients, LayerCost, Measured, Part, Rates, TensorGroup
from resihp_ext.cost.link import Link
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.cost.plan_cost import PlanCost, Section, Workload
from resihp_ext.cost.presets import FIGURES
from resihp_ext.cost.profile_file import Profile, read_profile
from resihp_ext.errors import UserError
from resihp_ext.plan.dry_run import Cost
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.schedule import Duration

__all__ = ["CostModel", "Link", "PlanCost", "Workload", "from_profile", "of_profile", "preset"]


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """What things cost on one kind of device and network."""

    name: str
    layers: LayerCost
    inside: Link
    """Between two devices of a node."""
    between: Link
    """Between devices of different nodes; each device has such a link of its own."""
    step_parameter_s: float
    """Of the optimizer, for each parameter that a rank updates."""
    element_bytes: int
    """Of an element of activations."""
    fixed_transition_s: float
    """Of a transition, beside moving state: agreeing, planning, building groups and modules."""

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
    ) -> float:
        """Forward of one micro-batch; see :meth:`part_s`."""
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
        sequence_parallel: bool = False,
    ) -> float:
        """A part of one micro-batch's work in some consecutive layers, on a group of ``tp`` ranks.

        Args:
            p: Throughput of the slowest rank.
            first: With the embedding.
            last: With output layer and loss.
            tokens: Default: a full micro-batch.
            squared: Sum of the squared segment lengths. Default: one document a sequence.
            across_nodes: Whether the group spans nodes.
        """
        section = Section(
            layers=layers,
            tp=tp,
            p=p,
            first=first,
            last=last,
            across_nodes=across_nodes,
            sequence_parallel=sequence_parallel,
        )
        work = Workload(
            tokens=shape.tokens if tokens is None else tokens,
            squared=shape.squared if squared is None else squared,
        )
        return self.section_s(shape, part, section, work)

    def section_s(self, shape: ModelShape, part: Part, section: Section, work: Workload) -> float:
        """As :meth:`part_s`."""
        if not section.p > 0:
            raise ValueError(f"a device with p = {section.p} computes nothing")
        group = self.group(section)
        layer = self.layers.layer(shape, group, part)
        alpha_s, beta_s = section.layers * layer.alpha_s, section.layers * layer.beta_s
        if section.first:
            alpha_s += self.layers.embedding_s(shape, group, part)
        if section.last:
            alpha_s += self.layers.head_s(shape, group, part)
        whole = Coefficients(alpha_s=alpha_s, beta_s=beta_s)
        return whole.seconds(work.tokens, work.squared) / section.p

    def group(self, section: Section) -> TensorGroup:
        """The tensor-parallel group of a section."""
        return TensorGroup(
            tp=section.tp,
            link=self.between if section.across_nodes else self.inside,
            sequence_parallel=section.sequence_parallel,
        )

    def duration(
        self,
        plan: Plan,
        shape: ModelShape,
        *,
        policy: MemoryPolicy | None = None,
        split_backward: bool = False,
    ) -> Duration:
        """Seconds of F, B and W of a full micro-batch on every instance, for the schedule."""
        return self.of_plan(
            plan, shape, policy=policy, split_backward=split_backward
        ).full_micro_batch_s

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
        return self.of_plan(
            plan, shape, policy=policy, split_backward=split_backward, workloads=workloads
        ).action_s

    def of_plan(
        self,
        plan: Plan,
        shape: ModelShape,
        *,
        policy: MemoryPolicy | None = None,
        split_backward: bool = False,
        workloads: Sequence[Workload] | None = None,
    ) -> PlanCost:
        """What :meth:`cost` and :meth:`duration` are made of, piece by piece."""
        return PlanCost(self, plan, shape, policy or MemoryPolicy(), split_backward, workloads)

    def transition_s(self, moved_bytes_per_rank: Mapping[int, int], plan: Plan) -> float:
        """From one plan to ``plan``, given the bytes that each rank sends or receives."""
        nodes = {device.node for device in plan.devices if device.alive}
        link = self.between if len(nodes) > 1 else self.inside
        busiest = max(moved_bytes_per_rank.values(), default=0)
        return self.fixed_transition_s + link.message_s(busiest)


def preset(name: str) -> CostModel:
    """A model from published figures.

    Raises:
        UserError: no such preset.
    """
    if name not in FIGURES:
        raise UserError(f"cost model {name!r}: choose one of {', '.join(FIGURES)}, or a profile")
    figures = FIGURES[name]
    memory_bytes_per_s = figures.memory_bytes_per_s * figures.memory_utilisation
    return CostModel(
        name=name,
        layers=Rates(
            matrix_flops=figures.peak_flops * figures.matrix_utilisation,
            attention_flops=figures.peak_flops * figures.attention_utilisation,
            memory_bytes_per_s=memory_bytes_per_s,
            element_bytes=figures.element_bytes,
        ),
        inside=figures.inside,
        between=figures.between,
        step_parameter_s=figures.step_bytes / memory_bytes_per_s,
        element_bytes=figures.element_bytes,
        fixed_transition_s=figures.fixed_transition_s,
    )


def from_profile(path: str | Path) -> CostModel:
    """A model from what ``resihp profile`` has measured.

    Raises:
        UserError: the file cannot be read, or is not a profile.
    """
    return of_profile(read_profile(path))


def of_profile(profile: Profile) -> CostModel:
    """The same, of a profile that was read already."""
    return CostModel(
        name=profile.device,
        layers=Measured(shape=profile.shape, layers=profile.layers),
        inside=profile.inside,
        between=profile.between,
        step_parameter_s=profile.step_parameter_s,
        element_bytes=profile.element_bytes,
        fixed_transition_s=profile.fixed_transition_s,
    )
