"""Virtual stages: Megatron's interleaved order, hand-over on the same ranks, evaluations, order."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from resihp_ext.plan.action import COMPUTE, Action, Kind
from resihp_ext.plan.check import checked
from resihp_ext.plan.clock import play, room_of
from resihp_ext.plan.dry_run import dry_run, peak_in_flight
from resihp_ext.plan.fifo import out_of_order, received_in_order
from resihp_ext.plan.grid import compute_grid
from resihp_ext.plan.plan import Device, Instance, Plan, PlanError, Replica, Stage, uniform_plan
from resihp_ext.plan.program import Program, ProgramError
from resihp_ext.plan.schedule import one_forward_one_backward

pytestmark = pytest.mark.unit

SIZES = [(1, 2, 3), (2, 2, 2), (2, 2, 8), (2, 3, 6), (3, 2, 9), (4, 2, 4), (4, 2, 12), (4, 4, 20)]
sizes = pytest.mark.parametrize(("pp", "virtual", "micro_batches"), SIZES)


def at(replica: int, stage: int) -> Instance:
    return Instance(replica=replica, stage=stage)


def interleaved(pp: int, virtual: int, micro_batches: int, dp: int = 1) -> Plan:
    return uniform_plan(
        num_layers=pp * virtual,
        tp=1,
        pp=pp,
        dp=dp,
        micro_batches=micro_batches * dp,
        virtual=virtual,
    )


def computed(program: Program, host: Instance) -> list[str]:
    return [str(action) for action in program.actions(host) if action.kind in COMPUTE]


def named(kind: str, micro_batch: int, chunk: int) -> str:
    return f"{kind}{micro_batch}" + (f"#{chunk}" if chunk else "")


def turns(pp: int, virtual: int, micro_batches: int) -> list[tuple[int, int]]:
    """Groups of ``pp`` micro-batches, each chunk after chunk (Narayanan et al. 2021)."""
    return [
        (group + m, chunk)
        for group in range(0, micro_batches, pp)
        for chunk in range(virtual)
        for m in range(pp)
    ]


def textbook(pp: int, virtual: int, micro_batches: int, rank: int) -> list[str]:
    order = turns(pp, virtual, micro_batches)
    forwards = [named("F", m, chunk) for m, chunk in order]
    backwards = [named("B", m, virtual - 1 - chunk) for m, chunk in order]
    warm_up = min((pp - rank - 1) * 2 + (virtual - 1) * pp, len(order))
    steady = [x for pair in zip(forwards[warm_up:], backwards, strict=False) for x in pair]
    return forwards[:warm_up] + steady + backwards[len(order) - warm_up :]


@sizes
@pytest.mark.parametrize("p", [1.0, 0.7])
def test_a_uniform_plan_has_megatrons_interleaved_order(
    pp: int, virtual: int, micro_batches: int, p: float
) -> None:
    """Also where every device is as slow as the others: rounding must not change the order."""
    plan = interleaved(pp, virtual, micro_batches, dp=2)
    plan = replace(plan, devices=tuple(replace(device, p=p) for device in plan.devices))
    program = checked(one_forward_one_backward(plan), plan)
    for rank in range(pp):
        expected = textbook(pp, virtual, micro_batches, rank)
        for replica in (0, 1):
            found = computed(program, at(replica, rank))
            halved = [
                re.sub(r"\d+", lambda m: str(int(m[0]) // 2), name, count=1) for name in found
            ]
            assert halved == expected
        warm_up = (pp - rank - 1) * 2 + (virtual - 1) * pp
        assert room_of(plan)[at(0, rank)] == warm_up + 1
        peak = peak_in_flight(program, at(0, rank))
        assert peak == min(warm_up + 1, virtual * micro_batches)


@sizes
def test_interleaving_shrinks_the_bubble(pp: int, virtual: int, micro_batches: int) -> None:
    program = one_forward_one_backward(interleaved(pp, virtual, micro_batches))

    def cost(_instance: Instance, action: Action) -> float:
        return {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(action.kind, 0.0)

    assert dry_run(program, cost).makespan == 3 * (virtual * micro_batches + pp - 1)


def test_the_text_names_hosts_and_chunks() -> None:
    plan = interleaved(2, 2, 2)
    program = one_forward_one_backward(plan)
    assert program.to_text().splitlines() == [
        "0.0+0.2: F0 SF0>0.1 F1 SF1>0.1 RF0#1<0.1 F0#1 SF0#1>0.3 RF1#1<0.1 F1#1 SF1#1>0.3 "
        "RB0#1<0.3 B0#1 SB0#1>0.1 RB1#1<0.3 B1#1 SB1#1>0.1 RB0<0.1 B0 RB1<0.1 B1 SYNC STEP",
        "0.1+0.3: RF0<0.0 F0 SF0>0.2 RF1<0.0 F1 SF1>0.2 RF0#1<0.2 F0#1 B0#1 SB0#1>0.2 "
        "RF1#1<0.2 F1#1 B1#1 SB1#1>0.2 RB0<0.2 B0 SB0>0.0 RB1<0.2 B1 SB1>0.0 SYNC STEP",
    ]
    assert Program.from_text(program.to_text()) == program
    assert program.chunks(at(0, 1)) == (at(0, 1), at(0, 3))
    assert program.host_of(at(0, 3)) == at(0, 1)
    assert compute_grid(program).splitlines()[1].split()[:4] == ["0.0+0.2", "F0", "F1", "F0#1"]


@pytest.mark.parametrize("text", ["F3#1", "B0#2", "W3#1", "SF3#1>1.2", "RB3#10<0.12", "F3"])
def test_actions_of_chunks_round_trip(text: str) -> None:
    assert str(Action.parse(text)) == text


@pytest.mark.parametrize(
    "text", ["F#1", "F3#", "F3#-1", "SYNC#1", "SF3>1.2#1", "RF3#1>0.1", "F3#1.2"]
)
def test_what_is_no_action_of_a_chunk(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse(text)


def test_a_chunk_that_makes_no_sense() -> None:
    for kind, micro_batch, chunk in ((Kind.SYNC, -1, 1), (Kind.FORWARD, 0, -1)):
        with pytest.raises(PlanError, match=f"chunk {chunk}"):
            Action(kind=kind, micro_batch=micro_batch, chunk=chunk)


@pytest.mark.parametrize("text", ["0.0+0.0: F0\n", "0.0+0.1: F0\n0.1: F0\n"])
def test_an_instance_has_one_line(text: str) -> None:
    with pytest.raises(PlanError, match="has a line already"):
        Program.from_text(text)


def test_on_the_same_ranks_nothing_is_sent() -> None:
    plan = interleaved(1, 2, 2)
    program = checked(one_forward_one_backward(plan), plan)
    assert program.to_text() == "0.0+0.1: F0 F0#1 B0#1 F1 B0 F1#1 B1#1 B1 SYNC STEP\n"


BROKEN = {
    "F0#1 comes too early: before F0": "0.0+0.1: F0#1 F0 B0#1 B0 SYNC STEP",
    "B0 comes too early: before B0#1": "0.0+0.1: F0 F0#1 B0 B0#1 SYNC STEP",
    "W0 comes too early: before B0": "0.0+0.1: F0 F0#1 B0#1 W0 B0 W0#1 SYNC STEP",
    "SF0>0.1 is not what the routes demand": "0.0+0.1: F0 SF0>0.1 F0#1 B0#1 B0 SYNC STEP",
    "F0#2 is not what the routes demand": "0.0+0.1: F0 F0#2 B0#1 B0 SYNC STEP",
    "B0#1 is missing": "0.0+0.1: F0 F0#1 B0 SYNC STEP",
    "program: 0.0: the chunks of the plan are 0.0+0.1": "0.0: F0 F0#1 B0#1 B0 SYNC STEP",
    "its instances are not the plan's: 0.1": "0.0: F0 B0 SYNC STEP\n0.1: F0 B0 SYNC STEP",
}


@pytest.mark.parametrize("words", BROKEN)
def test_broken_programs_of_chunks(words: str) -> None:
    with pytest.raises(ProgramError, match=re.escape(words)):
        checked(Program.from_text(BROKEN[words] + "\n"), interleaved(1, 2, 1))


def test_a_dry_run_of_a_chunk_that_is_not_there() -> None:
    program = Program.from_text("0.0: F0#1\n")
    with pytest.raises(ProgramError, match=r"0\.0: F0#1 is for a chunk that is not there"):
        dry_run(program, lambda _instance, _action: 1.0)


def test_costs_are_asked_for_the_chunk() -> None:
    plan = uniform_plan(num_layers=4, tp=1, pp=2, dp=1, micro_batches=1, virtual=2)
    asked = []
    dry_run(
        one_forward_one_backward(plan),
        lambda instance, action: asked.append((str(instance), str(action))) or 1.0,
    )
    assert ("0.2", "F0#1") in asked
    assert ("0.1", "SB0>0.0") in asked
    assert ("0.0", "SYNC") in asked


@pytest.mark.parametrize(("pp", "micro_batches", "lost"), [(2, 8, 1), (4, 16, 1), (4, 16, 3)])
def test_a_lost_host_costs_little_more_than_its_work(
    pp: int, micro_batches: int, lost: int
) -> None:
    """All micro-batches pass through the other replica's host. Waiting in turn, as on uniform
    plans, costs half as much again there, or never ends."""
    plan = interleaved(pp, 2, micro_batches, dp=2)
    routes = tuple(
        tuple(replace(i, replica=1) if i.stage % pp == lost else i for i in route)
        for route in plan.routes
    )
    plan = replace(plan, routes=routes).validated()
    program = checked(one_forward_one_backward(plan), plan)
    rooms = room_of(plan)
    assert at(0, lost) not in rooms
    for host in plan.hosts:
        assert peak_in_flight(program, host) <= rooms.get(host, 0)

    def cost(_instance: Instance, action: Action) -> float:
        return {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0}.get(action.kind, 0.0)

    work = 3 * 2 * micro_batches * 2
    assert dry_run(program, cost).makespan < 1.1 * work
    patient = play(
        plan, lambda _instance, kind: 2.0 if kind is Kind.BACKWARD else 1.0, patient=True
    )
    assert patient is None or patient.makespan > 1.4 * work


@sizes
def test_an_evaluation_goes_forward_in_the_same_turns(
    pp: int, virtual: int, micro_batches: int
) -> None:
    plan = interleaved(pp, virtual, micro_batches)
    program = one_forward_one_backward(plan, forward_only=True)
    checked(program, plan, forward_only=True)
    expected = [named("F", m, chunk) for m, chunk in turns(pp, virtual, micro_batches)]
    for host in plan.hosts:
        assert computed(program, host) == expected
        assert peak_in_flight(program, host) == 1
        kinds = {action.kind for action in program.actions(host)}
        assert kinds <= {Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECV_FORWARD}


def test_an_evaluation_is_no_training_step_and_the_other_way_round() -> None:
    plan = interleaved(2, 2, 2)
    with pytest.raises(ProgramError, match=r"B0 is missing"):
        checked(one_forward_one_backward(plan, forward_only=True), plan)
    with pytest.raises(ProgramError, match=r"RB0#1<0\.3 is not what the routes demand"):
        checked(one_forward_one_backward(plan), plan, forward_only=True)


def overtaking() -> tuple[Plan, str]:
    """Micro-batch 1 reaches 0.1 before micro-batch 0 does, and is run after it."""
    replica = Replica(stages=(Stage(ranks=(0,), layers=(0, 1)), Stage(ranks=(1,), layers=(1, 2))))
    route = (at(0, 0), at(0, 1))
    plan = Plan(
        version=0,
        num_layers=2,
        devices=tuple(Device(rank=rank, node=0) for rank in range(2)),
        replicas=(replica,),
        routes=(route, route),
    ).validated()
    text = (
        "0.0: F1 SF1>0.1 F0 SF0>0.1 RB0<0.1 B0 RB1<0.1 B1 SYNC STEP\n"
        "0.1: RF0<0.0 F0 B0 SB0>0.0 RF1<0.0 F1 B1 SB1>0.0 SYNC STEP\n"
    )
    return plan, text


def test_messages_that_overtake_each_other_are_refused_and_put_in_order() -> None:
    plan, text = overtaking()
    program = Program.from_text(text)
    with pytest.raises(ProgramError) as error:
        checked(program, plan)
    first, *rows = str(error.value).splitlines()
    assert first == (
        "program: 0.1, action 0: RF0<0.0: out of order: what belongs to RF1 from 0.0 to 0.1 was "
        "sent before"
    )
    assert ">>RF0<0.0<<" in rows[2]
    mended = received_in_order(program)
    assert out_of_order(mended) is None
    assert checked(mended, plan).to_text().splitlines()[1] == (
        "0.1: RF1<0.0 RF0<0.0 F0 B0 SB0>0.0 F1 B1 SB1>0.0 SYNC STEP"
    )


def test_an_activation_and_a_gradient_that_go_the_same_way_keep_their_order() -> None:
    plan = interleaved(2, 2, 2)
    good = one_forward_one_backward(plan).to_text()
    bad = good.replace("RF1#1<0.1 F1#1 SF1#1>0.3 RB0#1<0.3", "RB0#1<0.3 RF1#1<0.1 F1#1 SF1#1>0.3")
    words = "RB0#1<0.3: out of order: what belongs to RF1 from 0.1 to 0.2 was sent before"
    with pytest.raises(ProgramError, match=re.escape(words)):
        checked(Program.from_text(bad), plan)
    assert received_in_order(Program.from_text(bad)).to_text() != bad
    checked(received_in_order(Program.from_text(bad)), plan)


def test_a_program_whose_sends_and_receives_are_in_order_stays_as_it_is() -> None:
    program = one_forward_one_backward(interleaved(3, 3, 6))
    assert received_in_order(program) == program
