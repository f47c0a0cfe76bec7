"""ReCycle and Oobleck, plain and strengthened: closed forms, published examples, what they run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest

from resihp_ext.cost.cluster import uniform_cluster, usable_memory_bytes
from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.detector.itp import Walk
from resihp_ext.plan.action import COMPUTE, Kind
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import Plan, Stage, uniform_plan
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.simulator.engine import simulate
from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policies.oobleck import Oobleck
from resihp_ext.simulator.policies.oobleck_templates import best_cut, covered, step_s
from resihp_ext.simulator.policies.recycle import ReCycle, apart, arranged, together
from resihp_ext.simulator.policies.recycle_schedule import Decoupled
from resihp_ext.simulator.policies.strengthened import (
    OobleckPlus,
    ReCyclePlus,
    by_speed,
    integer_shares,
)
from resihp_ext.simulator.policy import Answer, Cause, Policy, Undone, View
from resihp_ext.simulator.setting import Setting

pytestmark = pytest.mark.unit


def setting(nodes: int, tp: int, pp: int, dp: int, each: int, layers: int = 16) -> Setting:
    shape = replace(MODELS["llama2-13b"], num_layers=layers)
    cluster = uniform_cluster(
        nodes=nodes, devices_per_node=each, memory_bytes=usable_memory_bytes("a100")
    )
    plan = uniform_plan(
        num_layers=layers, tp=tp, pp=pp, dp=dp, micro_batches=4 * pp * dp, devices_per_node=each
    )
    return Setting(
        name="test",
        cluster=cluster,
        shape=shape,
        cost=preset("a100"),
        memory=MemoryPolicy(sequence_parallel=True, sharded=True),
        nominal=replace(plan, devices=cluster.devices),
    )


def view(of: Setting, layout: Layout | None, health: Health, cause: Cause, **more: float) -> View:
    return View(
        setting=of, cause=cause, layout=layout, health=health, now_s=0.0, held=layout, **more
    )


def check(of: Setting, answer: Answer, health: Health) -> Plan:
    """What must hold of every layout."""
    assert answer.layout is not None
    plan = answer.layout.plan
    used = [rank for one in plan.replicas for rank in one.ranks]
    assert len(used) == len(set(used))
    assert not set(used) & health.dead
    assert plan.micro_batches == of.nominal.micro_batches
    for route in plan.routes:
        at = 0
        for visit in route:
            low, high = plan.stage(visit).layers
            assert low == at
            at = high
        assert at == of.shape.num_layers
    return plan


# ReCycle: F = B = W = 1, no communication (BASELINES 1.5).

Workers = frozenset[tuple[int, int]]


def broken(stages: int, pipelines: int, each: int, failed: Iterable[tuple[int, int]]) -> Plan:
    plan = uniform_plan(
        num_layers=stages,
        tp=1,
        pp=stages,
        dp=pipelines,
        micro_batches=each * pipelines,
        devices_per_node=1,
    )
    holes = frozenset(failed)
    live: dict[int, list[Stage]] = {
        s: [one.stages[s] for p, one in enumerate(plan.replicas) if (p, s) not in holes]
        for s in range(stages)
    }
    fake = setting(stages * pipelines, 1, 1, 1, 1, layers=stages)
    return arranged(replace(fake, nominal=plan), Health(), live, holes)


def whole_s(program: Program, split: bool) -> float:
    backward = 1.0 if split else 2.0
    return dry_run(
        program,
        lambda _, a: 0.0 if a.kind not in COMPUTE else backward if a.kind is Kind.BACKWARD else 1.0,
    ).makespan


def paced_s(plan: Plan, program: Program) -> float:
    """Steps of staggered iterations after each other, each stage on its own."""
    first, count = {}, 0
    for host, actions in program.lists:
        first[host], count = count, count + len(actions)
    walk = Walk(program, first)
    busy = np.where(walk.work >= 0, 1.0, 0.0)
    layers = [plan.stage(host).layers for host in walk.hosts]
    begin, ends = np.zeros(len(layers)), []
    for _ in range(8):
        found = walk.ends_s(busy, np.zeros(len(busy)), begin)
        met = {one: max(found[i] for i, x in enumerate(layers) if x == one) for one in layers}
        begin = np.array([met[one] for one in layers])
        ends.append(float(begin.max()))
    return ends[-1] - ends[-2]


@pytest.mark.parametrize(
    ("size", "failed", "naive", "decoupled", "staggered"),
    [
        ((8, 4, 16), [], 69, 69, 66),
        ((8, 4, 16), [(0, 3)], 92, 70, 66),
        ((8, 4, 16), [(0, 3), (1, 3)], 118, 99, 96),
        ((8, 4, 16), [(0, 3), (1, 5)], 92, 71, 71),
        ((8, 8, 32), [(0, 3)], 144, 119, 111),
        ((4, 4, 16), [(0, 1)], 80, 68, 66),
    ],
)
def test_recycle_is_as_fast_as_published(
    size: tuple[int, int, int],
    failed: list[tuple[int, int]],
    naive: int,
    decoupled: int,
    staggered: int,
) -> None:
    """At most the figures of BASELINES (its own list scheduler's; 118: theirs is 116), and never
    faster than the slowest stage's workers can be."""
    stages, pipelines, each = size
    plan = broken(*size, failed)
    lost = [sum(s == stage for _, s in failed) for stage in range(stages)]
    bound = max(3 * each * pipelines / (pipelines - one) for one in lost)
    program = Decoupled()(plan, lambda *_: 1.0)
    plain = one_forward_one_backward(
        plan, duration=lambda _, kind: 2.0 if kind is Kind.BACKWARD else 1.0
    )
    assert bound <= whole_s(plain, split=False) <= naive
    assert bound <= whole_s(program, split=True) <= decoupled
    assert bound <= paced_s(plan, program) + 1e-9 <= staggered + 1e-9


def test_fault_free_1f1b_is_that_of_the_table() -> None:
    for size, seconds in (((8, 4, 16), 69), ((8, 8, 32), 117), ((4, 4, 16), 57)):
        plain = one_forward_one_backward(
            broken(*size, []), duration=lambda _, kind: 2.0 if kind is Kind.BACKWARD else 1.0
        )
        assert whole_s(plain, split=False) == seconds


def test_only_numbers_of_failed_workers_count() -> None:
    assert together([1, 0, 2]) == {(0, 0), (0, 2), (1, 2)}
    assert apart([1, 0, 2], 3) == {(0, 0), (1, 2), (2, 2)}


SMALL = setting(nodes=4, tp=4, pp=4, dp=2, each=8)
"""Two pipelines of four groups, two groups a node."""


@pytest.mark.parametrize("policy", [ReCycle, ReCyclePlus, Oobleck, OobleckPlus])
def test_a_death_is_survived_and_repair_leads_back(policy: type[Policy]) -> None:
    one = policy()
    first = one.begin(SMALL)
    health = Health.of({5: 0.0})
    found = one.answer(view(SMALL, first, health, Cause.DEAD))
    check(SMALL, found, health)
    assert found.undone is Undone.STEP
    assert found.pause_s > 0
    back = one.answer(view(SMALL, found.layout, Health(), Cause.BACK))
    assert check(SMALL, back, Health()).replicas == first.plan.replicas
    assert back.moved_bytes > 0


def test_recycle_loses_the_group_and_moves_nothing() -> None:
    policy = ReCycle()
    layout = policy.begin(SMALL)
    health = Health.of({5: 0.0})
    found = policy.answer(view(SMALL, layout, health, Cause.DEAD))
    plan = check(SMALL, found, health)
    group = next(s.ranks for r in SMALL.nominal.replicas for s in r.stages if 5 in s.ranks)
    assert not {rank for one in plan.replicas for rank in one.ranks} & set(group)
    assert found.moved_bytes == 0
    assert found.layout is not None
    assert found.layout.schedule.staggered


@pytest.mark.parametrize("policy", [ReCycle, ReCyclePlus])
def test_a_stage_without_workers_waits_and_starts_anew(policy: type[Policy]) -> None:
    stage = [one.stages[1].ranks[0] for one in SMALL.nominal.replicas]
    faults = [
        Happening(at_s=100, p=((stage[0], 0.0),)),
        Happening(at_s=200, p=((stage[1], 0.0),)),
        Happening(at_s=300, p=((stage[1], 1.0),)),
    ]
    found = simulate(SMALL, policy(), faults, until_s=600)
    assert [one.after >= 0 for one in found.changes] == [True, False, True]
    assert found.redone > 0
    assert "started anew" in found.changes[-1].reason


def test_plain_recycle_bears_slow_devices_and_the_strengthened_shares_by_speed() -> None:
    health = Health.of({5: 0.5})
    layout = Layout(plan=SMALL.nominal)
    plain = ReCycle().answer(view(SMALL, layout, health, Cause.SLOW))
    assert plain.layout is layout
    found = ReCyclePlus().answer(view(SMALL, layout, health, Cause.SLOW))
    plan = check(SMALL, found, health)
    visits = [
        sum(v == one for route in plan.routes for v in route)
        for one in plan.instances
        if 5 in plan.stage(one).ranks
    ]
    assert visits == [] or visits[0] < SMALL.nominal.micro_batches // 2


def test_a_worker_that_is_hopeless_is_treated_as_failed() -> None:
    big = setting(nodes=8, tp=4, pp=4, dp=4, each=8)
    health = Health.of({5: 0.05})
    found = ReCyclePlus().answer(view(big, Layout(plan=big.nominal), health, Cause.SLOW))
    plan = check(big, found, health)
    assert 5 not in {rank for one in plan.replicas for rank in one.ranks}


def test_shares_by_speed_are_whole_and_best() -> None:
    assert integer_shares([1.0, 1.0, 0.5], 10) == [4, 4, 2]
    for speeds, total in (((1.0, 0.3), 7), ((0.9, 0.4, 0.7), 6)):
        mine = max(n / v for n, v in zip(integer_shares(speeds, total), speeds, strict=True))
        every = product(range(total + 1), repeat=len(speeds))
        best = min(
            max(n / v for n, v in zip(one, speeds, strict=True))
            for one in every
            if sum(one) == total
        )
        assert mine == pytest.approx(best)
    health = Health.of({5: 0.5})
    plan = by_speed(SMALL, health, SMALL.nominal)
    stage = next(i for i in plan.instances if 5 in plan.stage(i).ranks)
    total = SMALL.nominal.micro_batches
    speeds = [0.5 if number == stage.replica else 1.0 for number in range(2)]
    visits = sum(v == stage for route in plan.routes for v in route)
    assert visits == integer_shares(speeds, total)[stage.replica]


# Oobleck.


def test_the_template_search_is_exact() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        layers = int(rng.integers(3, 8))
        stages = int(rng.integers(1, layers + 1))
        layer_s = [float(x) for x in rng.integers(1, 6, layers)]
        found = best_cut(layer_s, stages, 4 * stages)
        assert found is not None
        best = min(
            step_s(_sums(layer_s, cut), 4 * stages)
            for cut in product(range(1, layers + 1), repeat=stages)
            if sum(cut) == layers
        )
        assert found[0] == pytest.approx(best)
        assert step_s(_sums(layer_s, found[1]), 4 * stages) == pytest.approx(best)


def _sums(layer_s: list[float], cut: tuple[int, ...]) -> list[float]:
    edges = np.concatenate(([0], np.cumsum(cut)))
    return [sum(layer_s[a:b]) for a, b in pairwise(edges)]


def test_the_published_example_of_coverage() -> None:
    """f = 1, n0 = 3, 13 nodes: it runs on 6 to 13 of them."""
    assert [n for n in range(1, 14) if covered(3, 1, n)] == list(range(6, 14))


def test_oobleck_goes_on_with_all_nodes_that_are_left_until_the_model_does_not_fit() -> None:
    job = setting(nodes=6, tp=4, pp=4, dp=3, each=8)
    policy = Oobleck()
    layout: Layout | None = policy.begin(job)
    least = policy._templates.smallest
    dead: dict[int, float] = {}
    for node in range(6):
        dead[8 * node] = 0.0
        health = Health.of(dead)
        found = policy.answer(view(job, layout, health, Cause.DEAD))
        left = 5 - node
        if left < least:
            assert found.layout is None
            return
        plan = check(job, found, health)
        nodes = {rank // 8 for one in plan.replicas for rank in one.ranks}
        assert nodes == set(range(node + 1, 6)), "a node is lost whole, all others work"
        layout = found.layout
    pytest.fail("it never ran out of nodes")


def test_reconfiguration_borrows_and_merges() -> None:
    job = setting(nodes=6, tp=4, pp=4, dp=3, each=8)
    policy = Oobleck()
    policy.begin(job)
    policy._templates.smallest = 2
    policy._templates._known |= dict.fromkeys((0, 1))
    assert policy._reconfigured([(0, 1), (2, 3)]) == [(0, 1), (2, 3)]
    borrowed = policy._reconfigured([(0,), (2, 3, 4)])
    assert sorted(map(len, borrowed)) == [2, 2]
    assert {n for one in borrowed for n in one} == {0, 2, 3, 4}
    assert [sorted(one) for one in policy._reconfigured([(0,), (2, 3)])] == [[0, 2, 3]]
    assert policy._reconfigured([(0,)]) == []


def test_oobleck_deals_by_speed_only_when_strengthened() -> None:
    health = Health.of({5: 0.5})
    plain = Oobleck()
    layout = plain.begin(SMALL)
    assert plain.answer(view(SMALL, layout, health, Cause.SLOW)).layout is layout
    plus = OobleckPlus()
    layout = plus.begin(SMALL)
    found = plus.answer(view(SMALL, layout, health, Cause.SLOW))
    plan = check(SMALL, found, health)
    assert found.pause_s == 0
    counts = [sum(r[0].replica == n for r in plan.routes) for n in range(len(plan.replicas))]
    slow = next(n for n, one in enumerate(plan.replicas) if 5 in one.ranks)
    assert counts[slow] == min(counts) < max(counts)


def test_a_node_that_has_cost_enough_is_given_up_and_taken_back() -> None:
    big = setting(nodes=8, tp=4, pp=4, dp=4, each=8)
    health = Health.of({5: 0.05})
    policy = OobleckPlus()
    layout = policy.begin(big)
    first = policy.answer(view(big, layout, health, Cause.SLOW))
    assert 5 in {r for one in check(big, first, health).replicas for r in one.ranks}
    second = policy.answer(view(big, first.layout, health, Cause.WAITED, lost_s=60.0))
    assert 5 not in {r for one in check(big, second, health).replicas for r in one.ranks}
    back = policy.answer(view(big, second.layout, Health(), Cause.BACK))
    assert check(big, back, Health()).replicas == layout.plan.replicas
