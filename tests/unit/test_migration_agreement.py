"""Ranks agree on moves while they run: threads over torch's own store, in random time.

Each thread executes a rank's list for real, but for the computation: its messages are events. What
all of them have executed must be one valid program, whatever was proposed, voted and dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

import pytest
from torch.distributed import HashStore

from megatron.resilience.executor.migration import Course, Migrations
from resihp_ext.errors import UserError
from resihp_ext.plan.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from resihp_ext.plan.amend import Move, amended, step_time
from resihp_ext.plan.check import checked
from resihp_ext.plan.plan import Instance, Plan, uniform_plan
from resihp_ext.plan.program import Message, Program
from resihp_ext.plan.schedule import one_forward_one_backward

LIMIT_S = 30.0
SLOW = Instance(replica=1, stage=0)


@dataclass
class World:
    """Messages between ranks that are threads."""

    program: Program
    sent: set[tuple[Message, int]] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def send(self, message: Message, tp_rank: int) -> None:
        with self.changed:
            self.sent.add((message, tp_rank))
            self.changed.notify_all()

    def receive(self, message: Message, tp_rank: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: (message, tp_rank) in self.sent, LIMIT_S), message


def run_rank(course: Course, world: World, tp_rank: int, pause: Callable[[Action], float]) -> list:
    executed: list[Action] = []
    index = 0
    while True:
        course.before(index)
        action = course.actions[index]
        if action.kind is Kind.SYNC:
            return executed
        if action.kind in RECEIVES:
            world.receive(world.program.message(course.host, action), tp_rank)
        elif action.kind in SENDS:
            world.send(world.program.message(course.host, action), tp_rank)
        else:
            assert action.kind in COMPUTE
            with course.around(action):
                time.sleep(pause(action))
        executed.append(action)
        index += 1


def run_step(plan: Plan, *, delta: int, seed: int, slow: float = 4.0) -> list[Course]:
    """A step of all ranks; checks what they have executed."""
    program, store = one_forward_one_backward(plan), HashStore()
    world = World(program)
    courses, jobs = [], []
    with ThreadPoolExecutor(len(plan.devices)) as pool:
        for host in plan.hosts:
            for tp_rank, rank in enumerate(plan.stage(host).ranks):
                course = Course(
                    store=store,
                    key="pass",
                    host=host,
                    speaks=tp_rank == 0,
                    delta=delta,
                    plan=plan,
                    program=program,
                )
                random = Random(seed * 100 + rank)
                factor = slow if host == SLOW else 1.0

                def pause(action: Action, random: Random = random, factor: float = factor) -> float:
                    unit_s = 0.003 if action.kind is Kind.FORWARD else 0.006
                    return unit_s * factor * random.uniform(0.8, 1.2)

                courses.append(course)
                jobs.append(pool.submit(run_rank, course, world, tp_rank, pause))
        executed = [job.result(LIMIT_S) for job in jobs]
    most = max(courses, key=lambda course: len(course.moves))
    for course, actions in zip(courses, executed, strict=True):
        # Whoever has heard of fewer moves is not concerned by the others.
        assert course.moves == most.moves[: len(course.moves)]
        assert tuple(actions) == most.program.actions(course.host)[:-2]
    checked(most.program, most.plan)
    return courses


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("tp", "pp", "dp"), [(1, 2, 2), (2, 2, 2), (1, 3, 3)])
def test_what_all_execute_is_one_valid_program(tp: int, pp: int, dp: int, seed: int) -> None:
    plan = uniform_plan(num_layers=pp, tp=tp, pp=pp, dp=dp, micro_batches=8 * dp)
    run_step(plan, delta=1, seed=seed)


def test_work_leaves_the_slow_instance() -> None:
    plan = uniform_plan(num_layers=2, tp=1, pp=2, dp=2, micro_batches=24)
    courses = run_step(plan, delta=1, seed=1)
    moves = max((course.moves for course in courses), key=len)
    assert moves[0].source == SLOW
    assert [move.source for move in moves].count(SLOW) > len(moves) / 2, "times are random"


def test_nothing_is_said_within_delta() -> None:
    plan = uniform_plan(num_layers=2, tp=1, pp=2, dp=2, micro_batches=16)
    assert not any(course.proposed for course in run_step(plan, delta=8, seed=1))


def two_courses() -> tuple[dict[Instance, Course], Move]:
    plan = uniform_plan(num_layers=1, tp=1, pp=1, dp=2, micro_batches=8)
    program, store = one_forward_one_backward(plan), HashStore()
    courses = {
        host: Course(
            store=store, key="p", host=host, speaks=True, delta=1, plan=plan, program=program
        )
        for host in plan.hosts
    }
    source, target = plan.hosts
    move = Move(micro_batch=plan.routes.index((source,)), source=source, target=target)
    return courses, move


def propose(course: Course, move: Move) -> dict[Instance, int]:
    time_of = step_time(lambda _one, _kind: 1.0)
    found = amended(course.program, course.plan, move, {}, time_of)
    assert found is not None
    course.propose(found, move)
    return found.holds


def test_all_must_vote_before_a_move_counts() -> None:
    courses, move = two_courses()
    one, other = courses.values()
    holds = propose(one, move)
    assert set(holds) == set(courses)
    other.before(0)
    one.before(0)
    assert one.moves == other.moves
    assert one.program == other.program


def test_who_comes_to_its_hold_first_drops_the_proposal() -> None:
    courses, move = two_courses()
    one, other = courses.values()
    hold = propose(one, move)[one.host]
    one.before(hold)
    assert one.moves == []
    other.before(0)
    assert other.moves == []
    assert other.program == one.program
    # The next proposal has another number.
    propose(one, move)
    assert other.plan == one.plan


def test_who_has_passed_its_hold_drops_the_proposal() -> None:
    courses, move = two_courses()
    one, other = courses.values()
    hold = propose(one, move)[one.host]
    one.before(hold + 1)
    other.before(0)
    assert one.moves == other.moves == []


def test_passes_leave_nothing_in_the_store() -> None:
    plan = uniform_plan(num_layers=1, tp=1, pp=1, dp=2, micro_batches=8)
    program, store = one_forward_one_backward(plan), HashStore()
    migrations = Migrations()
    host = plan.hosts[0]
    assert migrations.begin(plan, program, host, speaks=True, tidies=True) is None
    migrations.delta = 1
    migrations.meet(store, 3)
    move = Move(micro_batch=plan.routes.index((host,)), source=host, target=plan.hosts[1])
    for _ in range(3):
        course = migrations.begin(plan, program, host, speaks=True, tidies=True)
        assert course is not None
        hold = propose(course, move)[host]
        course.before(hold)
        assert migrations.moved_here() == []
    kinds = {key for key in store.list_keys() if "proposal" in key or "word" in key}
    assert len(kinds) == 2, "of the last pass"
    assert migrations.begin(plan, program, None, speaks=False, tidies=True) is None


def test_a_negative_gap_is_refused() -> None:
    from megatron.resilience.executor.config import ExecutorConfig

    with pytest.raises(UserError, match="--resilience-migrate-delta-micro-batches -1"):
        ExecutorConfig(migrate_delta_micro_batches=-1)
