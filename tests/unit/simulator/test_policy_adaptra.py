"""Adaptra as a policy: its programs can run, and fit; slow devices leave it cold."""

from dataclasses import replace

import pytest
from straggler_views import Told, job, shares_of

from resihp_ext.cost.memory import peak_bytes
from resihp_ext.plan.check import checked
from resihp_ext.plan.plan import PlanError
from resihp_ext.plan.program import Program
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.iteration import Iterations
from resihp_ext.simulator.layout import Layout, Schedule
from resihp_ext.simulator.policies.adaptra import Adaptra
from resihp_ext.simulator.policy import Cause, Undone
from resihp_ext.simulator.setting import Setting

pytestmark = pytest.mark.unit


def built(setting: Setting, layout: Layout) -> Program:
    cost = setting.cost.of_plan(
        layout.plan, setting.shape, policy=setting.memory, split_backward=True
    )
    return layout.schedule.build(layout.plan, cost.full_micro_batch_s)


@pytest.mark.parametrize("links", [{}, {(0, 1): 0.02}, {(1, 2): 0.1, (2, 3): 0.01}])
def test_programs_can_run_and_fit_in_memory(links: dict[tuple[int, int], float]) -> None:
    setting = job()
    told = Told(Adaptra(), setting)
    told.of(Cause.SLOW, links=links)
    assert told.layout is not None
    program = checked(built(setting, told.layout), told.plan)
    peak = max(peak_bytes(told.plan, program, setting.shape, setting.memory).values())
    assert peak <= setting.cluster.memory_bytes


def test_equal_links_have_equal_schedules_that_tell_from_others() -> None:
    setting = job()
    told = Told(Adaptra(), setting)
    begun = told.layout
    assert begun is not None
    assert begun.schedule.split
    slow = told.of(Cause.SLOW, links={(0, 1): 0.05})
    assert slow.layout is not None
    assert slow.pause_s == 0
    assert slow.layout.schedule != begun.schedule
    back = told.of(Cause.BACK)
    assert back.layout is not None
    assert (back.layout.plan, back.layout.schedule) == (setting.nominal, begun.schedule)
    assert hash(back.layout.schedule) == hash(begun.schedule)


def test_adapting_is_worth_it() -> None:
    setting = job()
    health = Health.of({}, {(1, 2): 0.004})
    told = Told(Adaptra(), setting)
    begun = told.layout
    adapted = told.of(Cause.SLOW, links=health.left).layout
    assert begun is not None
    assert adapted is not None
    times = Iterations(setting)
    before_s, after_s, plain_s = (
        float(times.look(one, health).iteration_s.mean())
        for one in (begun, adapted, Layout(plan=setting.nominal))
    )
    assert after_s < 0.97 * before_s
    assert after_s < 0.9 * plain_s


def test_slow_devices_and_links_without_micro_batches_change_nothing() -> None:
    told = Told(Adaptra(), job())
    begun = told.layout
    # Stages 0 and 3: neighbours of neither.
    assert told.of(Cause.SLOW, links={(0, 3): 0.1}).layout is begun
    assert told.of(Cause.SLOW, {3: 0.3}).layout is begun
    assert told.of(Cause.WAITED, {3: 0.3}, lost_s=1e6).layout is begun


def test_a_death_costs_a_replica_until_the_device_is_back() -> None:
    told = Told(Adaptra(), job())
    dead = told.of(Cause.DEAD, {3: 0.0})
    assert dead.undone is Undone.CHECKPOINT
    assert dead.pause_s > told.setting.times.restart_s
    assert shares_of(told.plan) == [32]
    back = told.of(Cause.BACK)
    assert told.plan == told.setting.nominal
    assert back.undone is Undone.NOTHING
    assert back.pause_s > dead.pause_s


def test_crossing_micro_batches_are_refused() -> None:
    setting = job()
    routes = list(setting.nominal.routes)
    routes[0] = (routes[0][0], *routes[1][1:])
    told = Told(Adaptra(), setting)
    assert told.layout is not None
    schedule: Schedule = told.layout.schedule
    crossed = Layout(plan=replace(setting.nominal, routes=tuple(routes)), schedule=schedule)
    with pytest.raises(PlanError, match="stay in their replicas"):
        built(setting, crossed)
