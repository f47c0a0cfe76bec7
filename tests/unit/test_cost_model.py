"""Seconds: of layers, and of each action of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import random_plan

from resihp_ext.cost.cost_model import CostModel, Workload, preset
from resihp_ext.cost.layer_cost import Part
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.cost.presets import FIGURES
from resihp_ext.errors import UserError
from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Stage, uniform_plan
from resihp_ext.plan.schedule import one_forward_one_backward

pytestmark = pytest.mark.unit

SHAPE = replace(MODELS["llama2-7b"], num_layers=8, seq_length=4096)
A100 = preset("a100")


def instance(replica: int, stage: int) -> Instance:
    return Instance(replica=replica, stage=stage)


def one_replica(*tps: int, layers: int = 8, per_node: int = 8, **p_of: float) -> Plan:
    """Stages of equal depth with these TP degrees, ranks in order."""
    depth, ranks = layers // len(tps), iter(range(sum(tps)))
    stages = tuple(
        Stage(
            ranks=tuple(next(ranks) for _ in range(tp)),
            layers=(index * depth, (index + 1) * depth),
        )
        for index, tp in enumerate(tps)
    )
    devices = tuple(
        Device(rank=rank, node=rank // per_node, p=p_of.get(f"r{rank}", 1.0))
        for rank in range(sum(tps))
    )
    route = tuple(instance(0, stage) for stage in range(len(tps)))
    return Plan(
        version=0,
        num_layers=layers,
        devices=devices,
        replicas=(Replica(stages=stages),),
        routes=(route, route),
    ).validated()


# Layers


@pytest.mark.parametrize("name", FIGURES)
def test_time_is_linear_in_tokens_squares_and_layers(name: str) -> None:
    model = preset(name)

    def forward_s(layers: int, tokens: int, squared: int) -> float:
        return model.forward_s(SHAPE, layers=layers, tp=2, tokens=tokens, squared=squared)

    whole = forward_s(2, 4096, 4096**2)
    assert whole == pytest.approx(2 * forward_s(1, 4096, 4096**2))
    assert whole == pytest.approx(forward_s(2, 4096, 0) + forward_s(2, 0, 4096**2))
    assert whole == model.forward_s(SHAPE, layers=2, tp=2)
    assert forward_s(2, 4096, 4 * 1024**2) < whole


@pytest.mark.parametrize("name", FIGURES)
def test_more_ranks_and_faster_ones_take_less(name: str) -> None:
    model = preset(name)
    times = [model.forward_s(SHAPE, layers=1, tp=tp) for tp in (1, 2, 4, 8)]
    assert times == sorted(times, reverse=True)
    # What the ranks send each other keeps the gain below the degree.
    assert times[0] < 8 * times[3]
    assert model.forward_s(SHAPE, layers=1, tp=4, p=0.5) == 2 * times[2]


def test_ends_cost_more_and_a_dead_device_is_refused() -> None:
    middle = A100.forward_s(SHAPE, layers=2, tp=4)
    assert middle < A100.forward_s(SHAPE, layers=2, tp=4, first=True)
    assert middle < A100.forward_s(SHAPE, layers=2, tp=4, last=True)
    with pytest.raises(ValueError, match="p = 0"):
        A100.forward_s(SHAPE, layers=2, tp=4, p=0.0)


def test_the_loss_costs_more_than_its_product() -> None:
    """Passes over the logits in 32 bits: six forward, three backward, none for the weights."""
    spent = {
        part: A100.part_s(SHAPE, part, layers=1, tp=4, last=True)
        - A100.part_s(SHAPE, part, layers=1, tp=4)
        for part in Part
    }
    product_s = spent[Part.WEIGHT]
    passes = (spent[Part.FORWARD] - product_s) / (spent[Part.INPUT] - product_s)
    assert passes == pytest.approx(2.0)


def test_a_group_across_nodes_is_slower_and_sequence_parallelism_faster() -> None:
    inside = A100.part_s(SHAPE, Part.FORWARD, layers=1, tp=4)
    assert A100.part_s(SHAPE, Part.FORWARD, layers=1, tp=4, across_nodes=True) > inside
    assert A100.part_s(SHAPE, Part.FORWARD, layers=1, tp=4, sequence_parallel=True) < inside
    # The gradients of weights need nothing from the other ranks.
    weight = A100.part_s(SHAPE, Part.WEIGHT, layers=1, tp=4)
    assert A100.part_s(SHAPE, Part.WEIGHT, layers=1, tp=4, across_nodes=True) == weight


def test_backward_is_about_two_forwards() -> None:
    forward, inputs, weights = (
        A100.part_s(SHAPE, part, layers=1, tp=1, squared=0)
        for part in (Part.FORWARD, Part.INPUT, Part.WEIGHT)
    )
    assert inputs == forward
    assert 0.9 * forward < weights < forward
    forward, inputs, weights = (
        A100.part_s(SHAPE, part, layers=1, tp=1, tokens=0)
        for part in (Part.FORWARD, Part.INPUT, Part.WEIGHT)
    )
    # Attention has no weights; its backward computes five products where forward computes two.
    assert (inputs, weights) == (pytest.approx(2.5 * forward), 0.0)


def test_presets_by_name() -> None:
    with pytest.raises(UserError, match=r"b100.*a100, h100, h200, cpu"):
        preset("b100")


# Actions of a plan


def action_s(model: CostModel, plan: Plan, where: Instance, text: str, **options: object) -> float:
    return model.cost(plan, SHAPE, **options)(where, Action.parse(text))


def test_compute_is_that_of_the_stage() -> None:
    plan = one_replica(2, 2, r3=0.5)
    forward = A100.forward_s(SHAPE, layers=4, tp=2, first=True)
    assert action_s(A100, plan, instance(0, 0), "F0") == forward
    slow = A100.forward_s(SHAPE, layers=4, tp=2, p=0.5, last=True)
    assert action_s(A100, plan, instance(0, 1), "F0") == slow


def test_split_backward_costs_the_same_in_two_parts() -> None:
    plan = one_replica(2, 2)
    where = instance(0, 1)
    whole = action_s(A100, plan, where, "B0")
    parts = [action_s(A100, plan, where, text, split_backward=True) for text in ("B0", "W0")]
    assert whole == pytest.approx(sum(parts))
    again = action_s(A100, plan, where, "B0", policy=MemoryPolicy(recompute=True))
    assert again == pytest.approx(whole + action_s(A100, plan, where, "F0"))


def test_workloads_set_each_micro_batch_apart() -> None:
    plan, where = one_replica(1, 1), instance(0, 0)
    full = Workload(tokens=SHAPE.tokens, squared=SHAPE.squared)
    packed = replace(full, squared=SHAPE.squared // 16)
    cost = A100.cost(plan, SHAPE, workloads=[full, packed])
    forward_s = action_s(A100, plan, where, "F1")
    assert cost(where, Action.parse("F0")) == forward_s
    assert cost(where, Action.parse("F1")) < forward_s
    with pytest.raises(ValueError, match="1 workloads for 2 micro-batches"):
        A100.cost(plan, SHAPE, workloads=[full])


def test_plans_of_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="plan has 8 layers, tiny has 4"):
        A100.cost(one_replica(1), MODELS["tiny"])


BOUNDARY_BYTES = SHAPE.tokens * SHAPE.hidden_size * 2


@pytest.mark.parametrize(
    ("sender", "receiver", "share"), [(1, 1, 1), (4, 4, 4), (1, 4, 1), (4, 2, 2), (3, 2, 2)]
)
def test_one_copy_crosses_and_the_smaller_end_decides(
    sender: int, receiver: int, share: int
) -> None:
    plan = one_replica(sender, receiver)
    wire = A100.inside.message_s(BOUNDARY_BYTES / share)
    assert action_s(A100, plan, instance(0, 0), "SF0>0.1") == wire
    gather = A100.inside.all_gather_s(BOUNDARY_BYTES, receiver)
    assert action_s(A100, plan, instance(0, 1), "RF0<0.0") == gather
    parallel = MemoryPolicy(sequence_parallel=True)
    assert action_s(A100, plan, instance(0, 1), "RF0<0.0", policy=parallel) == 0.0


def test_the_slow_link_is_used_only_where_a_piece_crosses_nodes() -> None:
    far = one_replica(2, 2, per_node=2)
    assert action_s(A100, far, instance(0, 0), "SF0>0.1") == A100.between.message_s(
        BOUNDARY_BYTES / 2
    )
    # Ranks 0, 1 | 2, 3 on nodes 0, 0 | 0, 1: the second share leaves its node.
    mixed = one_replica(2, 2, per_node=3)
    assert action_s(A100, mixed, instance(0, 0), "SF0>0.1") == A100.between.message_s(
        BOUNDARY_BYTES / 2
    )
    near = one_replica(2, 2, per_node=4)
    assert action_s(A100, near, instance(0, 0), "SF0>0.1") == A100.inside.message_s(
        BOUNDARY_BYTES / 2
    )


def test_sync_is_an_all_reduce_of_all_gradients_and_step_moves_all_parameters() -> None:
    plan = uniform_plan(num_layers=8, tp=2, pp=2, dp=2, micro_batches=4)
    where = instance(0, 0)
    held = SHAPE.rank_parameters(depth=4, tp=2, first=True, last=False)
    assert action_s(A100, plan, where, "SYNC") == A100.inside.all_reduce_s(4 * held, 2)
    step = action_s(A100, plan, where, "STEP")
    assert step == held * A100.step_parameter_s
    sharded = action_s(A100, plan, where, "STEP", policy=MemoryPolicy(sharded=True))
    assert sharded == step / 2 + A100.inside.all_gather_s(2 * held, 2)
    alone = uniform_plan(num_layers=8, tp=2, pp=2, dp=1, micro_batches=4)
    assert action_s(A100, alone, where, "SYNC") == 0.0


def test_sync_and_step_count_all_chunks_of_a_rank() -> None:
    """The host answers for them; what one chunk sends to the next on the same ranks is free."""
    plan = uniform_plan(num_layers=8, tp=2, pp=2, dp=2, micro_batches=4, virtual=2)
    flat = uniform_plan(num_layers=8, tp=2, pp=2, dp=2, micro_batches=4)
    for text in ("SYNC", "STEP"):
        one, other = (
            action_s(A100, plan, instance(0, 0), text),
            action_s(A100, flat, instance(0, 0), text),
        )
        assert one == pytest.approx(other, rel=1e-3)
    stage = plan.replicas[0].stages[0]
    price = A100.of_plan(plan, SHAPE)
    assert price.wire_s(stage, stage, BOUNDARY_BYTES) == 0.0
    assert price.gather_s(stage, stage, BOUNDARY_BYTES) == 0.0


def test_sync_crosses_nodes_when_any_owner_of_a_layer_does() -> None:
    plan = uniform_plan(num_layers=8, tp=2, pp=2, dp=2, micro_batches=4, devices_per_node=4)
    assert action_s(A100, plan, instance(0, 0), "SYNC") < 1.1 * A100.inside.all_reduce_s(
        4 * SHAPE.rank_parameters(depth=4, tp=2, first=True, last=False), 2
    )
    apart = uniform_plan(num_layers=8, tp=2, pp=2, dp=2, micro_batches=4, devices_per_node=2)
    held = SHAPE.rank_parameters(depth=4, tp=2, first=True, last=False)
    assert action_s(A100, apart, instance(0, 0), "SYNC") == A100.between.all_reduce_s(4 * held, 2)


def test_transition_takes_what_its_busiest_rank_takes() -> None:
    plan = one_replica(2, 2)
    moved = {0: 10**9, 1: 3 * 10**9}
    expected = A100.fixed_transition_s + A100.inside.message_s(3 * 10**9)
    assert A100.transition_s(moved, plan) == expected
    assert A100.transition_s({}, plan) == A100.fixed_transition_s
    assert A100.transition_s(moved, one_replica(2, 2, per_node=2)) > expected


@pytest.mark.parametrize("seed", range(30))
def test_every_plan_has_a_price(seed: int) -> None:
    """Every action of random plans costs what is finite, and nothing negative."""
    plan = random_plan(seed)
    shape = replace(MODELS["tiny"], num_layers=plan.num_layers)
    model = preset("cpu")
    program = one_forward_one_backward(plan, duration=model.duration(plan, shape))
    timeline = dry_run(program, model.cost(plan, shape))
    assert all(0 <= span.start <= span.end for span in timeline.spans)
    slowest = max(
        sum(model.duration(plan, shape)(one, kind) for kind in (Kind.FORWARD, Kind.BACKWARD))
        for one in {one for route in plan.routes for one in route}
    )
    assert slowest < timeline.makespan < float("inf")
