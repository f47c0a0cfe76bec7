"""Work that moves while a step runs: amended programs stay valid, and steps do not get longer."""

from __future__ import annotations

from math import exp, log
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plans, random_plan

from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.amend import Move, amended, rerouted, step_time
from resihp_ext.plan.check import checked
from resihp_ext.plan.clock import room_of
from resihp_ext.plan.dry_run import Cost, dry_run, peak_in_flight
from resihp_ext.plan.plan import Instance, Plan, PlanError, uniform_plan
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.scheduler.migration import Progress, decide, pending
from resihp_ext.scheduler.migration_play import board_at, play_migrating


def slowed(factors: dict[Instance, float]) -> Cost:
    def cost(one: Instance, action: Action) -> float:
        seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(action.kind, 0.0)
        return seconds * factors.get(one, 1.0) + (0.02 if action.peer else 0.0)

    return cost


def drawn(random: Random, plan: Plan) -> Cost:
    return slowed({one: random.choice([1.0, 1.0, 1.5, 2.0, 4.0]) for one in plan.instances})


def grid(pp: int, dp: int, each: int) -> tuple[Plan, Program]:
    plan = uniform_plan(num_layers=2 * pp, tp=1, pp=pp, dp=dp, micro_batches=dp * each)
    return plan, one_forward_one_backward(plan)


def moves_of(plan: Plan) -> list[Move]:
    found = []
    for micro_batch, route in enumerate(plan.routes):
        for source in route:
            for target in plan.instances:
                move = Move(micro_batch=micro_batch, source=source, target=target)
                try:
                    rerouted(plan, move).validated()
                except PlanError:
                    continue
                found.append(move)
    return found


@settings(max_examples=150, deadline=None)
@given(plan=plans(), random=st.randoms(use_true_random=False))
def test_whatever_moves_the_program_is_valid_and_begins_as_it_has_begun(
    plan: Plan, random: Random
) -> None:
    program = one_forward_one_backward(plan)
    cost = drawn(random, plan)
    line = dry_run(program, cost)
    now_s = line.makespan * random.choice([0.0, 0.1, 0.3, 0.6, 0.9])
    begun = {host: one.begun for host, one in board_at(program, line, now_s).items()}
    choices = moves_of(plan)
    random.shuffle(choices)
    for move in choices[:6]:
        found = amended(program, plan, move, begun, step_time(lambda _one, _kind: 1.0))
        if found is None:
            continue
        checked(found.program, found.plan)
        assert move.target in found.plan.routes[move.micro_batch]
        room = room_of(found.plan)
        assert peak_in_flight(found.program, move.target) <= room[move.target]
        for host, count in begun.items():
            before, after = program.actions(host)[:count], found.program.actions(host)[:count]
            assert before == after, "what was begun stays"
        assert found.holds.keys() >= {move.source, move.target}
        # Only these have to know.
        around = {*found.plan.routes[move.micro_batch], move.source, move.target}
        assert found.holds.keys() <= around | set(plan.hosts)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), delta=st.integers(1, 3), late=st.booleans())
def test_random_steps_end_valid_and_not_later(seed: int, delta: int, late: bool) -> None:
    plan, random = random_plan(seed), Random(seed)
    program, cost = one_forward_one_backward(plan), drawn(random, plan)
    found = play_migrating(program, plan, cost, delta, latency_s=3.0 if late else 0.0)
    checked(found.program, found.plan)
    for host, room in room_of(found.plan).items():
        before = peak_in_flight(program, host)
        assert peak_in_flight(found.program, host) <= max(room, before)
    assert found.makespan_s <= dry_run(program, cost).makespan * (1 + 1e-9)


def test_a_slow_device_costs_less_in_every_uniform_layout() -> None:
    gains = []
    for pp, dp, each in ((2, 2, 8), (4, 2, 8), (2, 4, 8)):
        plan, program = grid(pp, dp, each)
        for stage in range(pp):
            for factor in (1.5, 2.0, 4.0):
                cost = slowed({Instance(replica=1, stage=stage): factor})
                without_s = dry_run(program, cost).makespan
                found = play_migrating(program, plan, cost, 1)
                assert found.makespan_s <= without_s
                gains.append(without_s / found.makespan_s)
    mean = exp(sum(map(log, gains)) / len(gains))
    assert mean > 1.2
    assert min(gains) > 1.0


def test_nothing_moves_without_a_reason() -> None:
    plan, program = grid(2, 2, 8)
    slow = {Instance(replica=1, stage=0): 2.0}
    assert play_migrating(program, plan, slowed({}), 1).moves == ()
    assert play_migrating(program, plan, slowed(slow), 0).moves == ()
    assert play_migrating(program, plan, slowed(slow), 8).moves == ()
    # All instances of the stage are equally slow: progress differs nowhere.
    both = {**slow, Instance(replica=0, stage=0): 2.0}
    assert play_migrating(program, plan, slowed(both), 1).moves == ()


def test_the_slowest_gives_its_last_pending_micro_batch_to_the_fastest() -> None:
    plan, program = grid(1, 3, 6)
    hosts = [Instance(replica=replica, stage=0) for replica in range(3)]
    times = {hosts[0]: 1.0, hosts[1]: 4.0, hosts[2]: 2.0}
    board = {
        host: Progress(begun=2 * n, forwards=n, backwards=n, forward_s=n * t, backward_s=n * t)
        for (host, t), n in zip(times.items(), (4, 1, 2), strict=True)
    }
    found = decide(program, plan, board, 2)
    assert found is not None
    last = pending(program, hosts[1], 2)[-1]
    assert found.move == Move(micro_batch=last, source=hosts[1], target=hosts[0])
    assert found.saves_s > 0
    assert decide(program, plan, board, 3) is None, "a gap of three is tolerated"
    assert decide(program, plan, {hosts[0]: board[hosts[0]]}, 2) is None, "others are unknown"


def test_moves_that_cannot_be() -> None:
    plan, program = grid(2, 2, 4)
    source, target = Instance(replica=1, stage=1), Instance(replica=0, stage=1)
    number = next(m for m, route in enumerate(plan.routes) if source in route)
    time = step_time(lambda _one, _kind: 1.0)
    move = Move(micro_batch=number, source=source, target=target)
    assert amended(program, plan, move, {}, time) is not None
    ended = {host: len(program.actions(host)) for host in plan.hosts}
    assert amended(program, plan, move, ended, time) is None
    assert amended(program, plan, move, {}, time, below=1.0) is None
    with pytest.raises(PlanError, match="its route is"):
        rerouted(plan, Move(micro_batch=number, source=target, target=source))
    with pytest.raises(PlanError, match="the layers there are others"):
        rerouted(
            plan,
            Move(micro_batch=number, source=source, target=Instance(replica=0, stage=0)),
        )
    chunked = uniform_plan(num_layers=4, tp=1, pp=2, dp=2, micro_batches=4, virtual=2)
    first = Move(
        micro_batch=0, source=Instance(replica=0, stage=0), target=Instance(replica=1, stage=0)
    )
    with pytest.raises(PlanError, match="several chunks"):
        rerouted(chunked, first)


def test_a_neighbour_that_waits_already_takes_no_part() -> None:
    """The receiver of the last micro-batch stands at its receive: it can hear of nothing."""
    plan, program = grid(2, 2, 2)
    source, target = Instance(replica=1, stage=0), Instance(replica=0, stage=0)
    number = max(m for m, route in enumerate(plan.routes) if source in route)
    receiver = Instance(replica=1, stage=1)
    actions = program.actions(receiver)
    at = next(
        index
        for index, one in enumerate(actions)
        if one.kind is Kind.RECV_FORWARD and one.micro_batch == number
    )
    move = Move(micro_batch=number, source=source, target=target)
    time = step_time(lambda _one, _kind: 1.0)
    assert amended(program, plan, move, {receiver: at}, time) is not None
    assert amended(program, plan, move, {receiver: at + 1}, time) is None
