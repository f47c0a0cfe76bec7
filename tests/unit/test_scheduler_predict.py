"""What planners predict is what the program's dry run says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from plans import random_plan

from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.memory import MemoryPolicy, peak_bytes
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import Plan, PlanError, uniform_plan
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.scheduler.predict import Predictor, memory_bytes
from resihp_ext.scheduler.problem import Problem

pytestmark = pytest.mark.unit

POLICIES = {
    "a100": MemoryPolicy(),
    "h100": MemoryPolicy(sequence_parallel=True),
    "cpu": MemoryPolicy(sharded=True, recompute=True),
}


def problem_of(plan: Plan, preset_name: str) -> Problem:
    return Problem(
        cluster=Cluster(devices=plan.devices, memory_bytes=10**12),
        shape=replace(MODELS["llama2-7b"], num_layers=plan.num_layers),
        cost=preset(preset_name),
        policy=POLICIES[preset_name],
        current=plan,
    )


def program_of(problem: Problem, plan: Plan) -> Program:
    duration = problem.cost.duration(plan, problem.shape, policy=problem.policy)
    return one_forward_one_backward(plan, duration=duration)


@pytest.mark.parametrize("preset_name", POLICIES)
@pytest.mark.parametrize("seed", range(60))
def test_prediction_is_the_dry_run(seed: int, preset_name: str) -> None:
    plan = random_plan(seed)
    problem = problem_of(plan, preset_name)
    program = program_of(problem, plan)
    cost = problem.cost.cost(plan, problem.shape, policy=problem.policy)
    found = Predictor(problem).predict(plan).iteration_s
    assert found == pytest.approx(dry_run(program, cost).makespan, rel=1e-12)
    bound = memory_bytes(problem, plan)
    real = peak_bytes(plan, program, problem.shape, problem.policy)
    assert bound.keys() == real.keys()
    assert all(bound[rank] >= real[rank] for rank in real)


def test_memory_is_exact_where_stages_are_equal() -> None:
    plan = uniform_plan(num_layers=8, tp=2, pp=4, dp=2, micro_batches=16)
    problem = problem_of(plan, "a100")
    real = peak_bytes(plan, program_of(problem, plan), problem.shape, problem.policy)
    assert memory_bytes(problem, plan) == real


def test_a_schedule_made_for_other_speeds_is_timed_with_these() -> None:
    differ = 0
    for seed in range(40):
        now = random_plan(seed)
        plan = replace(now, devices=tuple(replace(device, p=1.0) for device in now.devices))
        problem = problem_of(now, "a100")
        old_order = program_of(problem_of(plan, "a100"), plan)
        cost = problem.cost.cost(now, problem.shape, policy=problem.policy)
        wanted = dry_run(old_order, cost).makespan
        differ += wanted != dry_run(program_of(problem, now), cost).makespan
        order_p = {device.rank: device.p for device in plan.devices}
        found = Predictor(problem).predict(plan, order_p).iteration_s
        assert found == pytest.approx(wanted, rel=1e-12)
    assert differ > 2


def test_a_plan_of_other_devices_is_refused() -> None:
    plan = uniform_plan(num_layers=4, tp=1, pp=2, dp=1, micro_batches=2)
    cluster = Cluster(devices=plan.devices[:1], memory_bytes=1)
    with pytest.raises(PlanError, match=r"current plan: ranks \[1\] are not in the cluster"):
        replace(problem_of(plan, "a100"), cluster=cluster)
