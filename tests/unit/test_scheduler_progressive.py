"""The paper's planner: TP, then PP, then DP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from problems import GB, depths_of, layout, problem_of, shares_of, tps_of

from resihp_ext.cost.model_shape import MODELS
from resihp_ext.plan.check import checked
from resihp_ext.plan.plan import PlanError, uniform_plan
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.scheduler.decide import decide
from resihp_ext.scheduler.infeasible import InfeasibleError
from resihp_ext.scheduler.predict import Predictor, memory_bytes
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.progressive import progressive

pytestmark = pytest.mark.unit


def group_of_4(*speeds: float, **changes: object) -> Problem:
    return problem_of(
        layout(4, 1, 1, layers=4, micro_batches=4), dict(enumerate(speeds)), **changes
    )


@pytest.mark.parametrize(
    ("speeds", "kept"),
    [
        ((1.0, 1.0, 1.0, 1.0), (0, 1, 2, 3)),
        ((1.0, 1.0, 0.0, 1.0), (0, 1)),
        ((1.0, 0.6, 1.0, 1.0), (0, 1, 2, 3)),
        # Twice one is as much as four halves, and communicates less.
        ((0.5, 1.0, 1.0, 1.0), (1, 2)),
        ((0.2, 0.9, 0.2, 0.2), (1,)),
        ((0.0, 0.0, 0.4, 0.0), (2,)),
        ((0.8, 0.8, 0.8, 0.8), (0, 1, 2, 3)),
    ],
)
def test_kept_devices_maximise_degree_times_speed(
    speeds: Sequence[float], kept: tuple[int, ...]
) -> None:
    assert progressive(group_of_4(*speeds)).replicas[0].stages[0].ranks == kept


def test_degrees_are_powers_of_two() -> None:
    plan = layout(8, 1, 1, layers=4, micro_batches=4)
    assert tps_of(progressive(problem_of(plan, {0: 0.0, 1: 0.0, 2: 0.0}))) == [(4,)]


def test_the_degree_divides_the_model() -> None:
    # 10 heads divide by 2, not by 4; TP 5 of the layout as it is.
    shape = replace(
        MODELS["llama2-7b"],
        num_layers=4,
        hidden_size=2560,
        attention_heads=10,
        query_groups=10,
        ffn_hidden_size=2560,
        vocab_size=3840,
    )
    plan = layout(5, 1, 1, layers=4, micro_batches=4)
    assert tps_of(progressive(problem_of(plan, {0: 0.0}, shape=shape))) == [(2,)]


def test_memory_bounds_the_degree_from_below() -> None:
    # One fast device would be best, but does not hold the model.
    speeds = (1.0, 0.2, 0.2, 0.2)
    assert tps_of(progressive(group_of_4(*speeds))) == [(1,)]
    tight = group_of_4(*speeds, memory_bytes=20 * GB)
    found = progressive(tight)
    assert tps_of(found) == [(4,)]
    assert max(memory_bytes(tight, found).values()) <= 20 * GB


@pytest.mark.parametrize("dp", [1, 2])
def test_half_a_group_gets_half_of_its_layers(dp: int) -> None:
    """(4, 4, 4) becomes (5, 2, 5), one partition for all replicas."""
    plan = layout(4, 3, dp)
    middle = plan.replicas[0].stages[1].ranks
    found = progressive(problem_of(plan, {middle[0]: 0.0, middle[2]: 0.0}))
    assert depths_of(found) == [(5, 2, 5)] * dp
    assert tps_of(found) == [(4, 2, 4)] + [(4, 4, 4)] * (dp - 1)
    assert found.standby == ()
    assert found.version == plan.version + 1


def test_a_slow_device_that_is_kept_costs_its_stage_layers() -> None:
    plan = layout(1, 3, 1)
    found = progressive(problem_of(plan, {1: 0.5}))
    assert (depths_of(found), tps_of(found)) == ([(5, 2, 5)], [(1, 1, 1)])


def test_excluded_devices_stand_by() -> None:
    found = progressive(problem_of(layout(4, 3, 1), {5: 0.0}))
    assert tps_of(found) == [(4, 2, 4)]
    assert len(found.standby) == 1


def test_nothing_changes_without_damage() -> None:
    plan = layout(2, 2, 2)
    found = progressive(problem_of(plan))
    assert (found.replicas, found.routes) == (plan.replicas, plan.routes)


def test_micro_batches_leave_the_slow_instance() -> None:
    """One layer a stage: nothing to repartition."""
    plan = layout(1, 3, 2, layers=3, micro_batches=16)
    slow = plan.replicas[0].stages[1].ranks[0]
    problem = problem_of(plan, {slow: 0.4})
    found = progressive(problem).validated()
    at_slow = sum(route[1].replica == 0 for route in found.routes)
    assert at_slow <= 6
    assert shares_of(found) == [8, 8]
    predictor = Predictor(problem)
    straight = replace(found, routes=plan.routes)
    ratio = predictor.predict(found).iteration_s / predictor.predict(straight).iteration_s
    assert ratio < 0.9


def test_delta_holds_micro_batches_back() -> None:
    plan = layout(1, 3, 2, layers=3, micro_batches=16)
    slow = plan.replicas[0].stages[1].ranks[0]
    problem = problem_of(plan, {slow: 0.4})
    lazy = replace(problem, options=replace(problem.options, delta=99))
    assert progressive(lazy).routes == plan.routes


def test_a_replica_that_cannot_go_on_is_given_up() -> None:
    plan = layout(2, 2, 3)
    lost = plan.replicas[1].stages[0].ranks
    found = progressive(problem_of(plan, dict.fromkeys(lost, 0.0))).validated()
    assert len(found.replicas) == 2
    assert shares_of(found) == [6, 6]
    assert found.standby == plan.replicas[1].stages[1].ranks


def test_adaptation_starts_from_the_nominal_layout() -> None:
    """The layers of (5, 2, 5) come back when the device does."""
    plan = layout(4, 3, 1)
    broken = problem_of(plan, {4: 0.0, 5: 0.0})
    current = progressive(broken)
    healed = replace(broken, cluster=problem_of(plan).cluster, current=current, nominal=plan)
    back = progressive(healed)
    assert (depths_of(back), tps_of(back)) == ([(4, 4, 4)], [(4, 4, 4)])
    # Each device that went on keeps its part of the matrices.
    assert back.replicas[0].stages[1].ranks[0] == current.replicas[0].stages[1].ranks[0]
    assert progressive(replace(healed, nominal=None)).replicas == current.replicas


@pytest.mark.parametrize("seed", range(60))
def test_every_plan_can_run(seed: int) -> None:
    random = Random(seed)
    tp, pp, dp = random.choice([1, 2, 4]), random.choice([1, 2, 3]), random.choice([1, 2, 3])
    plan = uniform_plan(num_layers=6, tp=tp, pp=pp, dp=dp, micro_batches=dp * random.randint(1, 5))
    sick = random.sample(range(tp * pp * dp), min(tp * pp * dp, random.randint(1, 3)))
    problem = problem_of(plan, {rank: random.choice([0.0, 0.5, 0.9]) for rank in sick})
    try:
        found = progressive(problem).validated()
    except InfeasibleError:
        assert any(problem.p_of[rank] == 0 for rank in sick)
        return
    checked(one_forward_one_backward(found), found)
    assert max(memory_bytes(problem, found).values()) <= problem.cluster.memory_bytes


def test_what_fails_is_said_with_figures() -> None:
    plan = layout(4, 2, 1, layers=8)
    problem = problem_of(plan, {4: 0.0}, memory_bytes=11 * GB)
    with pytest.raises(InfeasibleError) as error:
        progressive(problem)
    assert str(error.value) == (
        "no plan for 7 live of 8 devices; closest is replica 0: stage 1 needs 12.2 GB a device at "
        "TP 2, 11.0 GB are there; least feasible degree 4, 3 live devices"
    )


def test_other_reasons_are_said() -> None:
    plan = layout(2, 2, 1)
    dead = dict.fromkeys(range(4), 0.0)
    for planner in ("joint", "progressive"):
        with pytest.raises(InfeasibleError, match="none of 4 devices is alive"):
            decide(problem_of(plan, dead), planner)
    with pytest.raises(InfeasibleError, match="stage 1 has none of its 2 devices left"):
        decide(problem_of(plan, {2: 0.0, 3: 0.0}), "progressive")
    with pytest.raises(InfeasibleError, match="no degree up to 2 is enough, 2 live devices"):
        decide(problem_of(plan, memory_bytes=GB), "joint")
    with pytest.raises(PlanError, match="planner 'best': choose one of joint, progressive"):
        decide(problem_of(plan), "best")
