"""The engine: what a run costs, second by second."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from resihp_ext.cost.cluster import uniform_cluster, usable_memory_bytes
from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.cost.plan_cost import Workload
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import Replica, uniform_plan
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.simulator.engine import SimulationError, simulate
from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.iteration import POOL, Iterations
from resihp_ext.simulator.layout import Layout, Schedule, split_backward
from resihp_ext.simulator.policies.nothing import Nothing
from resihp_ext.simulator.policies.planned import Joint, Progressive, lost_layers
from resihp_ext.simulator.policy import Answer, Policy, Sense, View
from resihp_ext.simulator.record import Record, State
from resihp_ext.simulator.restart import restart_s
from resihp_ext.simulator.setting import Setting

pytestmark = pytest.mark.unit

SHAPE = replace(MODELS["llama2-13b"], num_layers=8)
CLUSTER = uniform_cluster(nodes=2, devices_per_node=8, memory_bytes=usable_memory_bytes("a100"))
PLAN = replace(
    uniform_plan(num_layers=8, tp=4, pp=2, dp=2, micro_batches=16, devices_per_node=8),
    devices=CLUSTER.devices,
)
SETTING = Setting(
    name="small",
    cluster=CLUSTER,
    shape=SHAPE,
    cost=preset("a100"),
    memory=MemoryPolicy(sequence_parallel=True, sharded=True),
    nominal=PLAN,
)
ITERATIONS = Iterations(SETTING)
HEALTHY_S = float(ITERATIONS.look(Layout(plan=PLAN), Health()).iteration_s.mean())


def dies(at_s: float, *ranks: int) -> Happening:
    return Happening(at_s=at_s, p=tuple((rank, 0.0) for rank in ranks))


def slows(at_s: float, rank: int, p: float) -> Happening:
    return Happening(at_s=at_s, p=((rank, p),))


def run(policy: Policy, *happenings: Happening, until_s: float = 600.0) -> Record:
    return simulate(SETTING, policy, happenings, until_s=until_s, iterations=ITERATIONS)


@pytest.mark.parametrize("policy", [Nothing, Progressive, Joint])
def test_time_is_spent_without_gaps(policy: type[Policy]) -> None:
    found = run(policy(), dies(100, 3), slows(200, 9, 0.5), slows(300, 3, 1.0), slows(400, 9, 1.0))
    assert found.stretches[0].begin_s == 0
    assert found.seconds == 600
    for before, after in pairwise(found.stretches):
        assert before.end_s == after.begin_s
        assert before.end_s > before.begin_s
    counted = sum(one.steps for one in found.stretches)
    assert counted == found.steps + found.redone


def test_a_run_without_faults_is_the_healthy_job() -> None:
    found = run(Joint())
    assert found.spent_s == {State.TRAIN: pytest.approx(600)}
    assert found.goodput_ratio == pytest.approx(1.0, abs=0.01)
    assert not found.changes
    assert not found.alarms


def test_a_death_costs_a_broken_step_the_notice_and_the_change() -> None:
    found = run(Joint(), dies(100, 3))
    (change,) = found.changes
    assert found.spent_s[State.NOTICE] == pytest.approx(SETTING.times.notice_s)
    assert found.spent_s[State.CHANGE] == pytest.approx(change.pause_s)
    assert 0 < found.spent_s[State.BROKEN] < 2 * HEALTHY_S
    assert change.at_s == pytest.approx(100 + SETTING.times.notice_s)
    assert change.lost_steps == 0
    after = found.layouts[change.after].plan
    assert 3 not in {rank for one in after.replicas for rank in one.ranks}


def test_nobody_waits_where_a_spare_died() -> None:
    plan = replace(PLAN, replicas=PLAN.replicas[:1], routes=PLAN.routes)
    routes = tuple(tuple(replace(v, replica=0) for v in route) for route in PLAN.routes)
    setting = replace(SETTING, nominal=replace(plan, routes=routes))
    found = simulate(setting, Nothing(), [dies(100, 15)], until_s=300)
    assert set(found.spent_s) == {State.TRAIN}


def test_who_has_nothing_waits_for_repair_and_starts_from_the_checkpoint() -> None:
    found = run(Nothing(), dies(100, 3), slows(300, 3, 1.0))
    stop, start = found.changes
    assert stop.after == -1
    assert found.spent_s[State.WAIT] == pytest.approx(200 - SETTING.times.notice_s)
    assert start.pause_s == pytest.approx(restart_s(SETTING))
    assert found.redone == pytest.approx(100 / HEALTHY_S, abs=1.5), "no checkpoint was there yet"
    assert found.steps == pytest.approx((300 - restart_s(SETTING)) / HEALTHY_S, abs=3)


def test_checkpoints_bound_what_is_done_again() -> None:
    often = replace(SETTING, times=replace(SETTING.times, checkpoint_every_s=20.0))
    found = simulate(often, Nothing(), [dies(100, 3), slows(110, 3, 1.0)], until_s=600)
    assert 0 < found.redone < 60 / HEALTHY_S


def test_slow_devices_are_seen_and_the_job_is_fast_again() -> None:
    borne = run(Nothing(), slows(100, 5, 0.4))
    found = run(Joint(), slows(100, 5, 0.4))
    assert found.alarms == 1
    assert not found.false_alarms
    (change,) = found.changes
    assert change.cause == "slow"
    assert change.health == Health.of({5: 0.4})
    assert change.at_s < 100 + 12 * change.before_s
    assert change.after_s < 0.65 * change.before_s
    assert found.steps > 1.4 * borne.steps


def test_what_is_fast_again_is_used_again() -> None:
    found = run(Joint(), slows(100, 5, 0.05), slows(300, 5, 1.0))
    assert [one.cause for one in found.changes] == ["slow", "back"]
    assert found.layouts[found.changes[-1].after].plan.replicas == PLAN.replicas
    # A device that is out of the layout is looked at now and then.
    assert found.changes[-1].at_s <= 300 + SETTING.times.probe_every_s + 2 * HEALTHY_S


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    faults = (dies(100, 3), slows(200, 9, 0.5))
    one, two = run(Joint(), *faults), run(Joint(), *faults)
    assert one.stretches == two.stretches
    assert one.changes == two.changes
    other = simulate(replace(SETTING, seed=1), Joint(), faults, until_s=600)
    assert other.stretches != one.stretches


class Stubborn(Nothing):
    """Goes on with who is dead."""

    def answer(self, view: View) -> Answer:
        return Answer(layout=view.layout, reason="what death?")


def test_nobody_runs_on_dead_devices() -> None:
    with pytest.raises(SimulationError, match=r"policy none runs dead ranks \[3\]"):
        run(Stubborn(), dies(100, 3))


class Nervous(Nothing):
    """Looks at raw iteration times."""

    sense = Sense.RAW


def test_raw_times_need_a_validation_that_stops_all() -> None:
    found = run(Nervous(), slows(200, 5, 0.4), until_s=900)
    assert found.alarms >= 1
    assert found.spent_s[State.VALIDATE] == pytest.approx(
        found.alarms * SETTING.times.greyhound_validation_s
    )


@pytest.mark.parametrize("health", [Health(), Health.of({2: 0.5, 9: 0.7})])
@pytest.mark.parametrize("split", [False, True])
def test_iterations_are_those_of_the_program(health: Health, split: bool) -> None:
    """To the last bits: the dry run of the same program, micro-batch by micro-batch."""
    schedule = Schedule(name="split", build=split_backward, split=True) if split else Schedule()
    look = ITERATIONS.look(Layout(plan=PLAN, schedule=schedule), health)
    order = SETTING.cost.duration(PLAN, SHAPE, policy=SETTING.memory, split_backward=split)
    program = one_forward_one_backward(PLAN, duration=order, split_backward=split)
    real = replace(PLAN, devices=health.on(PLAN.devices))
    for at in (0, 7, POOL - 1):
        work = [
            Workload(tokens=SHAPE.tokens, squared=int(one)) for one in ITERATIONS.squared[:, at]
        ]
        price = SETTING.cost.cost(
            real, SHAPE, policy=SETTING.memory, split_backward=split, workloads=work
        )
        assert look.iteration_s[at] == pytest.approx(dry_run(program, price).makespan, rel=1e-12)


def test_a_slow_link_delays_what_passes_it() -> None:
    spread = replace(
        SETTING,
        nominal=replace(
            PLAN,
            replicas=tuple(
                Replica(
                    stages=(
                        replace(PLAN.replicas[i].stages[0]),
                        replace(PLAN.replicas[1 - i].stages[1]),
                    )
                )
                for i in (0, 1)
            ),
        ),
    )
    times = Iterations(spread)
    healthy = times.look(Layout(plan=spread.nominal), Health()).iteration_s
    slow = times.look(Layout(plan=spread.nominal), Health.of({}, {(0, 1): 0.05})).iteration_s
    assert (slow > healthy).all()


def test_layers_are_lost_when_no_owner_of_some_piece_is_left() -> None:
    first, second = (one.stages[0].ranks for one in PLAN.replicas)
    assert not lost_layers(PLAN, Health.of({first[0]: 0.0, second[1]: 0.0}))
    assert lost_layers(PLAN, Health.of({first[0]: 0.0, second[0]: 0.0}))
    assert lost_layers(PLAN, Health.of(dict.fromkeys((*first, second[3]), 0.0)))
