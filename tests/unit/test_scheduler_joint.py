"""The joint planner: what it finds, what it is compared with, and what it promises."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from problems import GB, depths_of, layout, problem_of, shares_of, tps_of

from resihp_ext.cost.memory import MemoryPolicy, peak_bytes
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.errors import UserError
from resihp_ext.plan.check import checked
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import PlanError, uniform_plan
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.scheduler.decide import decide
from resihp_ext.scheduler.infeasible import InfeasibleError
from resihp_ext.scheduler.options import Options
from resihp_ext.scheduler.predict import Predictor
from resihp_ext.scheduler.problem import Problem
from resihp_ext.scheduler.routes import crossed

pytestmark = pytest.mark.unit

TOOLS = Path(__file__).resolve().parents[2] / "tools" / "bench"


def random_problem(seed: int) -> Problem:
    """Small, middling and larger clusters, one to four devices dead or slow."""
    random = Random(seed)
    tp, pp, dp = random.choice([1, 2, 4]), random.choice([1, 2, 4]), random.choice([1, 2, 3])
    plan = layout(
        tp,
        pp,
        dp,
        layers=4 * random.randint(1, 3),
        micro_batches=dp * random.randint(1, 6),
        spares=random.choice([0, 0, 1, 2]),
    )
    sick = random.sample(range(len(plan.devices)), min(len(plan.devices), random.randint(1, 4)))
    policy = MemoryPolicy(sharded=random.random() < 0.5, sequence_parallel=random.random() < 0.5)
    return problem_of(
        plan,
        {rank: random.choice([0.0, 0.4, 0.7, 0.95]) for rank in sick},
        memory_bytes=random.choice([40, 80]) * GB,
        policy=policy,
        options=Options(expected_lifetime_s=random.choice([30.0, 1800.0])),
    )


@pytest.mark.parametrize("seed", range(80))
def test_every_decision_keeps_its_promises(seed: int) -> None:
    problem = random_problem(seed)
    try:
        decision = decide(problem)
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            decide(problem, "progressive")
        return
    plan = decision.plan.validated()
    now = replace(plan, devices=problem.cluster.devices)
    assumed = now if decision.name != "stay" else plan
    duration = problem.cost.duration(assumed, problem.shape, policy=problem.policy)
    program = checked(one_forward_one_backward(assumed, duration=duration), plan)
    cost = problem.cost.cost(now, problem.shape, policy=problem.policy)
    assert decision.iteration_s == pytest.approx(dry_run(program, cost).makespan, rel=1e-12)
    peaks = peak_bytes(plan, program, problem.shape, problem.policy)
    assert peaks.keys() == decision.memory_bytes.keys()
    assert all(peaks[rank] <= decision.memory_bytes[rank] for rank in peaks)
    assert max(decision.memory_bytes.values()) <= problem.cluster.memory_bytes
    others = [one.candidate for one in decision.runners_up]
    assert all(one.effective_s >= decision.effective_s and one.plan != plan for one in others)
    with suppress(InfeasibleError):
        assert decision.effective_s <= decide(problem, "progressive").effective_s


def test_the_random_problems_cover_what_is_hard() -> None:
    found = []
    for seed in range(80):
        try:
            found.append(decide(random_problem(seed)))
        except InfeasibleError:
            continue
    assert {one.name for one in found} >= {"stay", "joint", "progressive"}
    assert sum(len(set(depths_of(one.plan))) > 1 for one in found) > 10
    assert sum(len({tp for tps in tps_of(one.plan) for tp in tps}) > 1 for one in found) > 10
    assert sum(len(set(shares_of(one.plan))) > 1 for one in found) > 10


def test_a_spare_takes_the_place_of_a_dead_device() -> None:
    plan = layout(4, 4, 2, layers=32, spares=1)
    # On the node of the one that dies: a group across nodes would be slower than a smaller one.
    devices = (*plan.devices[:-1], replace(plan.devices[-1], node=0))
    decision = decide(problem_of(replace(plan, devices=devices), {5: 0.0}))
    assert tps_of(decision.plan) == [(4,) * 4] * 2
    assert decision.plan.replicas[1].stages[0].ranks == (4, 32, 6, 7)
    far = decide(problem_of(plan, {5: 0.0}))
    assert 32 not in {rank for one in far.plan.replicas for rank in one.ranks}


def test_what_one_stage_excludes_another_uses() -> None:
    """One device cannot hold the model; of two damaged pairs the healthy halves make a pair."""
    plan = layout(2, 1, 9, layers=4, micro_batches=144)
    problem = problem_of(plan, {0: 0.0, 2: 0.2}, memory_bytes=20 * GB)
    decision = decide(problem)
    groups = {stage.ranks for one in decision.plan.replicas for stage in one.stages}
    assert groups & {(1, 3), (3, 1)}
    assert decision.plan.standby == (2,)
    assert tps_of(decide(problem, "progressive").plan) == [(2,)] * 8
    assert decision.iteration_s < 0.95 * decide(problem, "progressive").iteration_s


def test_degrees_need_not_be_powers_of_two() -> None:
    shape = replace(
        MODELS["llama2-7b"],
        num_layers=2,
        hidden_size=6144,
        attention_heads=48,
        query_groups=48,
        ffn_hidden_size=12288,
    )
    plan = layout(4, 1, 1, layers=2, micro_batches=4)
    problem = problem_of(plan, {1: 0.0}, shape=shape)
    assert tps_of(decide(problem).plan) == [(3,)]
    assert tps_of(decide(problem, "progressive").plan) == [(2,)]


def test_layer_maps_may_differ_from_replica_to_replica() -> None:
    plan = layout(4, 3, 2, layers=24, micro_batches=24)
    slow = plan.replicas[1].stages[1].ranks[2]
    decision = decide(problem_of(plan, {slow: 0.3}))
    assert depths_of(decision.plan)[0] == (8, 8, 8)
    assert depths_of(decision.plan)[1] != (8, 8, 8)


def test_a_slow_replica_gets_fewer_micro_batches() -> None:
    plan = layout(1, 1, 17, layers=4, micro_batches=17 * 32)
    decision = decide(problem_of(plan, {2: 0.5}))
    assert shares_of(decision.plan) == [33, 33, 16] + [33] * 14
    assert (decision.name, decision.moved_bytes) == ("shares", 0)


def test_routes_cross_where_replicas_are_slow_at_different_stages() -> None:
    """Of the same groups and layers; other groups would often help more."""
    plan = layout(1, 2, 2, layers=2, micro_batches=8)
    slow = {plan.replicas[0].stages[0].ranks[0]: 0.3, plan.replicas[1].stages[1].ranks[0]: 0.3}
    problem = problem_of(plan, slow)
    predictor = Predictor(problem)
    found = crossed(problem, predictor, plan, 100)
    assert found is not None
    checked(one_forward_one_backward(found), found.validated())
    assert any(len({one.replica for one in route}) > 1 for route in found.routes)
    assert predictor.predict(found).iteration_s < 0.8 * predictor.predict(plan).iteration_s
    assert crossed(problem_of(plan), Predictor(problem_of(plan)), plan, 100) is None


def test_healthy_jobs_stay() -> None:
    plan = layout(2, 2, 2)
    decision = decide(problem_of(plan))
    assert decision.plan is plan
    assert (decision.name, decision.transition_s, decision.moved_bytes) == ("stay", 0.0, 0)
    assert decision.reason == "staying, since nothing else was looked for"


def test_devices_that_come_back_are_used_again() -> None:
    plan = layout(4, 2, 4, layers=8, micro_batches=16)
    broken = problem_of(plan, {1: 0.0})
    narrow = decide(broken, "progressive").plan
    assert tps_of(narrow)[0] == (2, 4)
    healed = replace(broken, cluster=problem_of(plan).cluster, current=narrow)
    for problem in (healed, replace(healed, nominal=plan)):
        decision = decide(problem)
        assert tps_of(decision.plan) == [(4, 4)] * 4
        assert depths_of(decision.plan) == [(4, 4)] * 4
        assert decision.moved_bytes > 0


def test_what_could_not_run_is_told() -> None:
    plan = layout(2, 2, 2)
    decision = decide(problem_of(plan, {1: 0.0}, nominal=plan))
    assert ("stay", "rank 1 is dead") in decision.refused
    assert ("nominal", "rank 1 is dead") in decision.refused
    tight = decide(problem_of(layout(2, 2, 2), {1: 0.7, 5: 0.0}, memory_bytes=30 * GB))
    assert max(tight.memory_bytes.values()) <= 30 * GB


def test_runners_up_carry_figures_and_reasons() -> None:
    problem = problem_of(layout(2, 2, 2), {1: 0.5}, options=Options(runners_up=4))
    decision = decide(problem)
    names = [one.candidate.name for one in decision.runners_up]
    assert len(names) == 4
    assert {"stay", "progressive"} <= set(names)
    for one in decision.runners_up:
        assert one.candidate.iteration_s > 0
        assert one.why
    stay = next(one for one in decision.runners_up if one.candidate.name == "stay")
    ratio = stay.candidate.iteration_s / decision.iteration_s - 1
    assert stay.why == f"{ratio:.1%} slower a step"


def test_equal_groups_are_the_last_resort() -> None:
    """One device a stage cannot hold what it must hold in flight; two can."""
    plan = layout(1, 17, 1, layers=17, micro_batches=17)
    problem = problem_of(plan, {7: 0.0}, memory_bytes=20 * GB)
    with pytest.raises(InfeasibleError):
        decide(problem, "progressive")
    decision = decide(problem)
    assert decision.name == "rebuilt"
    assert max(decision.memory_bytes.values()) <= 20 * GB


def test_virtual_stages_and_other_models_are_refused() -> None:
    virtual = uniform_plan(num_layers=8, tp=1, pp=2, dp=1, micro_batches=4, virtual=2)
    with pytest.raises(PlanError, match="without virtual stages"):
        problem_of(virtual)
    with pytest.raises(PlanError, match="12 layers, llama2-7b has 32"):
        problem_of(layout(1, 1, 1), shape=MODELS["llama2-7b"])


@pytest.mark.parametrize("name", ["expected_lifetime_s", "delta", "effort"])
def test_options_are_checked(name: str) -> None:
    with pytest.raises(UserError):
        Options(**{name: 0})


DIGESTS = """
import sys
sys.path.insert(0, "tests/unit")
from test_scheduler_joint import random_problem
from resihp_ext.scheduler.decide import decide
for seed in (3, 5, 9, 11):
    one = decide(random_problem(seed))
    print(one.plan.digest, one.iteration_s, one.moved_bytes, one.reason, one.runners_up[0].why)
"""


def test_the_same_inputs_give_the_same_bytes() -> None:
    """In processes with different hash seeds, too."""
    said = [
        subprocess.run(
            [sys.executable, "-c", DIGESTS],
            cwd=TOOLS.parents[1],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(TOOLS.parents[1])},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
    assert len(said[0].splitlines()) == 4


def test_small_clusters_get_the_best_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first cases of the benchmark; and the search that it compares with finds them alone."""
    monkeypatch.syspath_prepend(str(TOOLS))
    from exhaustive_plans import Exhaustive  # type: ignore[import-not-found]
    from planner_quality import compared  # type: ignore[import-not-found]
    from planner_quality import random_problem as quality_problem

    for number in range(20):
        problem = quality_problem(Random(f"0/{number}"))
        row = compared(problem)
        assert row["ratio"] <= 1.02
        assert not row["worse"]
        found_s = decide(problem).iteration_s
        assert Exhaustive(problem, 1.2 * found_s).run() == pytest.approx(found_s / row["ratio"])


def test_the_benchmark_says_what_others_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    from planner import timed  # type: ignore[import-not-found]

    assert timed("256", 1)["plan_256_s"] < 1
