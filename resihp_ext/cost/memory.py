"""Bytes of a rank: parameters, gradients, optimizer, activations in flight.

Activations are counted tensor by tensor, as in Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022, arXiv 2205.05198, section 4), less what today's
layers do not keep: fused attention keeps no scores, and there is no dropout. A plan's peak comes
from replaying its program; :func:`stage_bytes` is the same for a given number of micro-batches in
flight.

Not counted: the context of CUDA, buffers of NCCL, temporary tensors inside a layer, and what the
allocator wastes. Leave room for them.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.plan.action import Kind
from resihp_ext.plan.plan import Instance, Plan
from resihp_ext.plan.program import Program, is_split


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPolicy:
    """Sizes and choices; the defaults are Megatron's mixed precision with bf16."""

    param_bytes: int = 2
    """Of an element of parameters, hence of activations."""
    grad_bytes: int = 4
    master_bytes: int = 4
    """Of the optimizer's own copy of a parameter; 0 when parameters are in 32 bits anyway."""
    moment_bytes: int = 4
    """Of each of Adam's two moments."""
    sharded: bool = False
    """Whether replicas share the optimizer's state among them (distributed optimizer)."""
    sequence_parallel: bool = False
    recompute: bool = False
    """Whether only the inputs of layers are kept, and the rest is computed again."""
    fused: bool = True
    """Whether norms, rotary embedding and activation function are single kernels, as with
    Transformer Engine; local layers keep what lies between their parts, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The bytes of one stage on one of its ranks, by kind."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    """Of one micro-batch in flight."""
    recomputed: int
    """Of the layer that is being computed again; exists once."""
    buffers: int
    """Boundary tensors on their way, and logits before the loss has them; exist once."""

    @property
    def static(self) -> int:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def transient(self) -> int:
        """What exists once, whatever is in flight."""
        return self.recomputed + self.buffers

    def total(self, in_flight: int) -> int:
        """With micro-batches in flight."""
        moving = self.transient + in_flight * self.activations if in_flight else 0
        return self.static + moving


def layer_activation_bytes(shape: ModelShape, policy: MemoryPolicy, tp: int) -> int:
    """What one layer keeps of one micro-batch for its backward."""
    # The inputs of both norms (the residual stream), and what they give: the matrices' inputs.
    whole = 4 * shape.hidden_size
    # Queries, keys, values; what attention gives; both ends of the activation function.
    share = shape.qkv_size + shape.hidden_size + shape.fc1_size + shape.ffn_hidden_size
    tables = 0
    if not policy.fused:
        # The norms' inputs before their scales.
        whole += 2 * shape.hidden_size
        # Queries, keys and values before rotation; attention's output by heads and by tokens.
        share += (shape.qkv_size + shape.hidden_size) // 2 + shape.hidden_size
        # What the gate gives, and the other half, to which upstream adds an offset.
        share += 2 * shape.ffn_hidden_size if shape.gated else 0
        # Cosines and sines, of queries and of keys.
        tables = 4 * 4 * (shape.hidden_size // shape.attention_heads)
    whole_share = tp if policy.sequence_parallel else 1
    # Attention keeps the logarithm of each row's sum, in 32 bits.
    rows = (share * policy.param_bytes + 4 * shape.attention_heads) // tp
    return shape.tokens * (whole * policy.param_bytes // whole_share + rows + tables)


def input_bytes(shape: ModelShape, policy: MemoryPolicy, tp: int) -> int:
    """A boundary tensor: what goes into or comes out of a layer."""
    size = shape.tokens * shape.hidden_size * policy.param_bytes
    return size // tp if policy.sequence_parallel else size


def stage_memory(
    shape: ModelShape,
    policy: MemoryPolicy,
    *,
    depth: int,
    tp: int,
    first: bool,
    last: bool,
    shards: int = 1,
) -> StageMemory:
    """Counts one stage.

    Args:
        depth: Layers.
        first: Whether it holds the embedding.
        last: Whether it holds the output layer and the loss.
        shards: Replicas that share the optimizer's state, if the policy says so.
    """
    parameters = shape.rank_parameters(depth=depth, tp=tp, first=first, last=last)
    owned = -(-parameters // shards) if policy.sharded else parameters
    layer = layer_activation_bytes(shape, policy, tp)
    boundary = input_bytes(shape, policy, tp)
    logits = shape.tokens * shape.vocab_size // tp if last else 0
    # The head keeps the inputs of its norm and of its matrix, and the softmax in 32 bits, for which
    # logits in 32 bits are overwritten.
    head = (2 if policy.fused else 3) * boundary + 4 * logits if last else 0
    half_logits = logits * policy.param_bytes if policy.param_bytes < 4 else 0
    return StageMemory(
        parameters=parameters * policy.param_bytes,
        gradients=parameters * policy.grad_bytes,
        optimizer=owned * (policy.master_bytes + 2 * policy.moment_bytes),
        activations=depth * (boundary if policy.recompute else layer) + head,
        recomputed=layer - boundary if policy.recompute else 0,
        buffers=boundary * ((not first) + (not last)) + half_logits,
    )


def stage_bytes(
    shape: ModelShape,
    policy: MemoryPolicy,
    *,
    depth: int,
    tp: int,
    first: bool,
    last: bool,
    in_flight: int,
    shards: int = 1,
) -> int:
    """Peak of a rank of one stage with ``in_flight`` micro-batches; see :func:`stage_memory`."""
    stage = stage_memory(shape, policy, depth=depth, tp=tp, first=first, last=last, shards=shards)
    return stage.total(in_flight)


def instance_memory(
    plan: Plan, shape: ModelShape, policy: MemoryPolicy
) -> Mapping[Instance, StageMemory]:
    """Every instance of a plan; the optimizer's state is shared by all replicas."""
    return {
        instance: stage_memory(
            shape,
            policy,
            depth=stage.depth,
            tp=stage.tp,
            first=stage.layers[0] == 0,
            last=stage.layers[1] == plan.num_layers,
            shards=len(plan.replicas),
        )
        for instance in plan.instances
        for stage in (plan.stage(instance),)
    }


def peak_bytes(
    plan: Plan, program: Program, shape: ModelShape, policy: MemoryPolicy
) -> dict[int, int]:
    """Peak of every rank that holds a stage, by replaying the program; global ranks ascending."""
    memory = instance_memory(plan, shape, policy)
    peaks: dict[int, int] = {}
    for host in plan.hosts:
        peak = _peak_of_host(program, host, memory)
        peaks.update(dict.fromkeys(plan.stage(host).ranks, peak))
    return dict(sorted(peaks.items()))


def _peak_of_host(program: Program, host: Instance, memory: Mapping[Instance, StageMemory]) -> int:
    """Activations live from F to B, or to W where the backward is split."""
    chunks = [memory[chunk] for chunk in program.chunks(host)]
    actions = program.actions(host)
    frees = Kind.WEIGHT if is_split(actions) else Kind.BACKWARD
    # In an evaluation nothing is kept for a backward.
    keeps = any(action.kind is frees for action in actions)
    held = peak = 0
    for action in actions:
        size = memory[program.target(host, action)].activations if keeps else 0
        if action.kind is Kind.FORWARD:
            # One chunk is recomputed at a time; transfers of all may be on their way.
            moving = max(c.recomputed for c in chunks) + sum(c.buffers for c in chunks)
            held += size
            peak = max(peak, held + moving)
        elif action.kind is frees:
            held -= size
    return sum(chunk.static for chunk in chunks) + peak
