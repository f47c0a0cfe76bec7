"""The planner's process: it thinks ahead, and there is an answer whatever happens to it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from resihp_ext.control.actions import NeedPlan
from resihp_ext.control.planner import PlannerLimits, PlannerProcess, what_may_happen
from resihp_ext.control.planning import Brief, plan_for
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.plan.plan import Plan, uniform_plan

pytestmark = pytest.mark.dist

LIMIT_S = 30.0


def need(tp: int = 2, pp: int = 2, dp: int = 2, *, lost: tuple[int, ...] = ()) -> NeedPlan:
    plan = uniform_plan(num_layers=4, tp=tp, pp=pp, dp=dp, micro_batches=4 * dp, devices_per_node=4)
    brief = Brief(
        shape=MODELS["tiny"],
        policy=MemoryPolicy(param_bytes=4, master_bytes=0, fused=False),
        memory_bytes=10**9,
        nominal=plan,
        hardware="cpu",
    )
    devices = tuple((one.rank, one.node, one.rank not in lost) for one in plan.devices)
    return NeedPlan("epoch 1", devices, brief.to_json(), plan.to_json(), version=7)


@pytest.fixture
def planner() -> Iterator[PlannerProcess]:
    one = PlannerProcess(PlannerLimits(plan_s=10.0))
    one.start()
    wait_for(lambda: one.pid)
    yield one
    one.close()


def wait_for(what: Callable[[], object]) -> None:
    until_s = time.monotonic() + LIMIT_S
    while not what():
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_it_answers_as_the_pure_function_does(planner: PlannerProcess) -> None:
    asked = need(lost=(3,))
    plan, why, version, *_ = planner(asked).result(LIMIT_S)
    expected = plan_for(asked)
    assert (plan, why, version) == (expected.plan, expected.reason, 7)
    assert planner.pid is not None
    assert os.getpriority(os.PRIO_PROCESS, planner.pid) == min(19, os.nice(0) + 5)
    plan, why, *_ = planner(need(lost=tuple(range(8)))).result(LIMIT_S)
    assert (plan, why) == (None, "no plan: none of 8 devices is alive")


def test_what_may_happen_next_is_known_before_it_does(planner: PlannerProcess) -> None:
    running = need(lost=(6,))
    planner.prepare(running)
    wait_for(lambda: planner.computed_ahead == 7 + 2 + 1)
    os.kill(planner.pid or 0, signal.SIGSTOP)
    for asked in what_may_happen(running):
        later = replace(asked, version=11)
        future = planner(later)
        assert future.done()
        assert future.result()[2] == 11
    expected = plan_for(replace(need(lost=(6, 0)), version=11))
    assert planner(replace(need(lost=(6, 0)), version=11)).result()[0] == expected.plan


def test_a_question_does_not_wait_for_what_is_computed_ahead(planner: PlannerProcess) -> None:
    planner(need()).result(LIMIT_S)
    began_s = time.perf_counter()
    planner(need(lost=(1, 2))).result(LIMIT_S)
    alone_s = time.perf_counter() - began_s
    planner.prepare(need(4, 4, 32))  # each of these takes seconds
    time.sleep(0.5)
    began_s = time.perf_counter()
    planner(need(lost=(1, 3))).result(LIMIT_S)
    assert time.perf_counter() - began_s < 3 * alone_s + 0.3
    first = planner.pid
    planner.prepare(need())
    wait_for(lambda: planner.computed_ahead == 8 + 2)
    assert planner.pid == first


def test_a_dead_process_is_started_anew(planner: PlannerProcess) -> None:
    first = planner.pid
    future = planner(need(lost=(2,)))
    os.kill(first or 0, signal.SIGKILL)
    assert future.result(LIMIT_S)[0] == plan_for(need(lost=(2,))).plan
    assert planner(need(lost=(5,))).result(LIMIT_S)[0] == plan_for(need(lost=(5,))).plan
    assert planner.pid not in (None, first)


def test_a_process_that_hangs_is_done_without() -> None:
    planner = PlannerProcess(PlannerLimits(plan_s=1.0))
    planner.start()
    wait_for(lambda: planner.pid)
    planner(need()).result(LIMIT_S)
    hung = planner.pid or 0
    os.kill(hung, signal.SIGSTOP)
    began_s = time.perf_counter()
    plan, _, version, *_ = planner(need(lost=(2,))).result(LIMIT_S)
    assert time.perf_counter() - began_s < 5.0
    assert plan == plan_for(need(lost=(2,)), "progressive").plan
    assert version == 7
    assert planner(need(lost=(5,))).result(LIMIT_S)[0] is not None
    planner.close()
    assert not Path(f"/proc/{hung}").exists()


def test_without_any_process_there_is_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    planner = PlannerProcess()
    plan, *_ = planner(need(lost=(2,))).result(LIMIT_S)
    assert plan is not None
    assert 2 not in {rank for one in Plan.from_json(plan).replicas for rank in one.ranks}
    planner.close()


def test_closing_ends_it_at_once(planner: PlannerProcess) -> None:
    planner.prepare(need(4, 4, 32))
    time.sleep(0.5)
    pid = planner.pid
    began_s = time.perf_counter()
    planner.close()
    assert time.perf_counter() - began_s < 3.0
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RuntimeError, match="closed"):
        planner(need()).result(1.0)
