"""Bytes: the closed form, the replay of programs, and the published formula for activations."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import random_plan

from resihp_ext.cost.memory import (
    MemoryPolicy,
    StageMemory,
    input_bytes,
    instance_memory,
    layer_activation_bytes,
    peak_bytes,
    stage_bytes,
    stage_memory,
)
from resihp_ext.cost.model_shape import MODELS, ModelShape
from resihp_ext.plan.plan import Instance, Plan, uniform_plan
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import one_forward_one_backward

pytestmark = pytest.mark.unit

SHAPE = replace(MODELS["llama2-7b"], num_layers=8, seq_length=1024)
PLAIN = MemoryPolicy()
POLICIES = [
    PLAIN,
    MemoryPolicy(sharded=True),
    MemoryPolicy(sequence_parallel=True),
    MemoryPolicy(recompute=True),
    MemoryPolicy(recompute=True, sequence_parallel=True, sharded=True),
    MemoryPolicy(param_bytes=4, master_bytes=0, fused=False),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(
    ("tp", "pp", "micro_batches"), [(1, 1, 3), (2, 4, 8), (4, 2, 1), (1, 8, 5)]
)
def test_replay_of_1f1b_is_the_closed_form(
    policy: MemoryPolicy, tp: int, pp: int, micro_batches: int
) -> None:
    """1F1B holds as many micro-batches as stages remain, if there are so many."""
    plan = uniform_plan(num_layers=8, tp=tp, pp=pp, dp=2, micro_batches=2 * micro_batches)
    peaks = peak_bytes(plan, one_forward_one_backward(plan), SHAPE, policy)
    for instance in plan.instances:
        expected = stage_bytes(
            SHAPE,
            policy,
            depth=8 // pp,
            tp=tp,
            first=instance.stage == 0,
            last=instance.stage == pp - 1,
            in_flight=min(pp - instance.stage, micro_batches),
            shards=2,
        )
        assert {peaks[rank] for rank in plan.stage(instance).ranks} == {expected}
    assert sorted(peaks) == list(peaks)


def held(plan: Plan, program: Program, policy: MemoryPolicy = PLAIN) -> dict[Instance, int]:
    """Bytes that each host's ranks have at the peak beyond what is always there."""
    memory = instance_memory(plan, SHAPE, policy)
    peaks = peak_bytes(plan, program, SHAPE, policy)
    return {
        host: peaks[plan.stage(host).ranks[0]]
        - sum(memory[chunk].static + memory[chunk].transient for chunk in plan.chunks(host))
        for host in plan.hosts
    }


def test_chunks_of_a_rank_add_up() -> None:
    """Interleaved 1F1B (Narayanan et al. 2021) holds 2 (p - s - 1) + (v - 1) p + 1 chunks."""
    plan = uniform_plan(num_layers=8, tp=2, pp=4, dp=1, micro_batches=8, virtual=2)
    found = held(plan, one_forward_one_backward(plan))
    layer = layer_activation_bytes(SHAPE, PLAIN, 2)
    for host, total in found.items():
        # The last rank's second chunk has the loss, too.
        if host.stage < 3:
            assert total == layer * (2 * (4 - host.stage - 1) + 4 + 1)
    assert found[Instance(replica=0, stage=3)] > layer * 5


def test_split_backward_holds_activations_until_the_weights_are_done() -> None:
    plan = uniform_plan(num_layers=8, tp=1, pp=1, dp=1, micro_batches=1)
    whole = Program.from_text("0.0: F0 B0 F1 B1 SYNC STEP\n")
    late = Program.from_text("0.0: F0 B0 F1 B1 W0 W1 SYNC STEP\n")
    assert 2 * held(plan, whole)[plan.hosts[0]] == held(plan, late)[plan.hosts[0]]


def test_an_evaluation_keeps_nothing() -> None:
    plan = uniform_plan(num_layers=8, tp=1, pp=2, dp=1, micro_batches=4)
    program = one_forward_one_backward(plan, forward_only=True)
    assert set(held(plan, program).values()) == {0}


def test_ranks_without_micro_batches_hold_what_stays() -> None:
    plan = uniform_plan(num_layers=8, tp=1, pp=1, dp=2, micro_batches=2)
    alone = replace(plan, routes=plan.routes[:1])
    peaks = peak_bytes(alone, one_forward_one_backward(alone), SHAPE, PLAIN)
    assert peaks[1] == instance_memory(alone, SHAPE, PLAIN)[plan.hosts[1]].static
    assert peaks[0] > peaks[1]


@pytest.mark.parametrize("seed", range(30))
def test_every_rank_of_random_plans_is_counted(seed: int) -> None:
    plan = random_plan(seed)
    shape = replace(MODELS["tiny"], num_layers=plan.num_layers)
    program = one_forward_one_backward(plan)
    plain = peak_bytes(plan, program, shape, PLAIN)
    assert set(plain) == {rank for replica in plan.replicas for rank in replica.ranks}
    sharded = peak_bytes(plan, program, shape, MemoryPolicy(sharded=True))
    assert all(sharded[rank] <= plain[rank] for rank in plain)
    in_total = sum(
        plan.stage(one).tp * memory.parameters
        for one, memory in instance_memory(plan, shape, PLAIN).items()
    )
    assert in_total >= 2 * len(plan.replicas) * shape.parameters


# What is counted


def whole(policy: MemoryPolicy, shards: int = 1) -> StageMemory:
    return stage_memory(SHAPE, policy, depth=8, tp=1, first=True, last=True, shards=shards)


def test_mixed_precision_with_adam_takes_18_bytes_a_parameter() -> None:
    assert whole(PLAIN).static == 18 * SHAPE.parameters
    assert whole(MemoryPolicy(sharded=True), shards=4).static == pytest.approx(
        (6 + 12 / 4) * SHAPE.parameters, rel=1e-9
    )
    fp32 = MemoryPolicy(param_bytes=4, master_bytes=0)
    assert whole(fp32).static == 16 * SHAPE.parameters


GPT = ModelShape(
    name="gpt",
    num_layers=2,
    hidden_size=1024,
    ffn_hidden_size=4096,
    attention_heads=16,
    query_groups=16,
    vocab_size=1024,
    seq_length=512,
    micro_batch_size=2,
    gated=False,
)
SBH = GPT.tokens * GPT.hidden_size


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_layers_keep_what_the_paper_counts(tp: int) -> None:
    """Korthikanti et al. 2022: sbh (10 + 24/t), with sequence parallelism 34 sbh / t, both without
    the scores, which fused attention does not keep. Two of the 10 are masks of dropout, which these
    layers do not have; a number a row and head comes from fused attention."""
    rows = 4 * GPT.tokens * GPT.attention_heads // tp
    assert layer_activation_bytes(GPT, PLAIN, tp) == SBH * 8 + SBH * 24 // tp + rows
    parallel = MemoryPolicy(sequence_parallel=True)
    assert layer_activation_bytes(GPT, parallel, tp) == SBH * 32 // tp + rows


def test_recomputation_keeps_inputs_and_one_layer() -> None:
    """Korthikanti et al. 2022, table 2: 2 sbh."""
    full = stage_memory(GPT, MemoryPolicy(recompute=True), depth=2, tp=1, first=True, last=False)
    assert full.activations == 2 * (2 * SBH)
    assert full.recomputed == layer_activation_bytes(GPT, PLAIN, 1) - 2 * SBH
    plain = stage_memory(GPT, PLAIN, depth=2, tp=1, first=True, last=False)
    assert plain.recomputed == 0
    assert plain.activations == 2 * layer_activation_bytes(GPT, PLAIN, 1)


def test_the_ends_hold_logits_and_boundary_tensors() -> None:
    middle, last, alone = (
        stage_memory(GPT, PLAIN, depth=1, tp=2, first=first, last=last)
        for first, last in ((False, False), (False, True), (True, True))
    )
    boundary = input_bytes(GPT, PLAIN, 2)
    logits = GPT.tokens * GPT.vocab_size // 2
    assert boundary == 2 * SBH
    assert middle.buffers == 2 * boundary
    assert last.buffers == boundary + 2 * logits
    assert alone.buffers == 2 * logits
    assert last.activations - middle.activations == 2 * boundary + 4 * logits
    assert input_bytes(GPT, MemoryPolicy(sequence_parallel=True), 2) == SBH


def test_llama2_7b_needs_more_than_one_a100() -> None:
    """18 bytes of 6.74e9 parameters are 113 GiB; TP 8 with one micro-batch fits into 80."""
    shape = MODELS["llama2-7b"]
    options = {"depth": 32, "first": True, "last": True, "in_flight": 1}
    assert stage_bytes(shape, PLAIN, tp=1, **options) > 113 * 2**30
    assert stage_bytes(shape, PLAIN, tp=8, **options) < 80 * 2**30
