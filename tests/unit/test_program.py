"""Programs: the text form, the 1F1B order, what the check refuses, and the clock of the dry run."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from plans import random_plan

from resihp_ext.plan.action import COMPUTE, Action, Kind
from resihp_ext.plan.check import checked
from resihp_ext.plan.dry_run import dry_run, peak_in_flight
from resihp_ext.plan.grid import compute_grid, grid
from resihp_ext.plan.plan import Instance, Plan, PlanError, uniform_plan
from resihp_ext.plan.program import Cell, Program, ProgramError
from resihp_ext.plan.schedule import default_duration, one_forward_one_backward

pytestmark = pytest.mark.unit

PLAN = uniform_plan(num_layers=8, tp=2, pp=4, dp=2, micro_batches=12)
both = pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])


def program_of(plan: Plan, split: bool = False) -> Program:
    return one_forward_one_backward(plan, split_backward=split)


def computed(program: Program, instance: Instance) -> list[str]:
    return [str(a) for a in program.actions(instance) if a.kind in COMPUTE]


def with_actions(program: Program, instance: Instance, actions: list[Action]) -> Program:
    lists = {**dict(program.lists), instance: tuple(actions)}
    return replace(program, lists=tuple(sorted(lists.items())))


def compute_cost(instance: Instance, action: Action) -> float:
    return {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.WEIGHT: 1.0}.get(action.kind, 0.0)


@pytest.mark.parametrize(("pp", "micro_batches"), [(1, 3), (2, 2), (4, 4), (4, 9), (6, 3), (3, 16)])
def test_a_uniform_plan_has_the_textbook_order(pp: int, micro_batches: int) -> None:
    plan = uniform_plan(num_layers=pp, tp=1, pp=pp, dp=1, micro_batches=micro_batches)
    program = program_of(plan)
    for stage in range(pp):
        warm_up = min(pp - stage - 1, micro_batches)
        expected = [f"F{m}" for m in range(warm_up)]
        for m in range(micro_batches - warm_up):
            expected += [f"F{m + warm_up}", f"B{m}"]
        expected += [f"B{m}" for m in range(micro_batches - warm_up, micro_batches)]
        assert computed(program, Instance(replica=0, stage=stage)) == expected
    makespan = dry_run(program, compute_cost).makespan
    assert makespan == (micro_batches + pp - 1) * 3, "the known bubble of 1F1B"


def test_splitting_the_backward_fills_the_bubble_in_the_same_memory() -> None:
    plan = uniform_plan(num_layers=4, tp=1, pp=4, dp=1, micro_batches=12)

    def cost(_instance: Instance, action: Action) -> float:
        return float(action.kind in COMPUTE)

    whole, split = program_of(plan), program_of(plan, split=True)
    assert dry_run(split, cost).makespan < dry_run(whole, compute_cost).makespan
    for instance in plan.instances:
        assert peak_in_flight(split, instance) == peak_in_flight(whole, instance)


def test_stages_below_a_slow_one_are_fed_as_soon_as_may_be() -> None:
    plan = uniform_plan(num_layers=4, tp=1, pp=2, dp=2, micro_batches=8)
    slow = replace(plan, devices=(replace(plan.devices[0], p=0.25), *plan.devices[1:]))
    program = checked(program_of(slow), slow)
    order = "F0 F2 B0 F4 B2 F6 B4 B6"
    assert " ".join(computed(program, Instance(replica=0, stage=0))) == order


def test_the_default_cost_knows_degree_depth_and_the_slowest_device() -> None:
    plan = uniform_plan(num_layers=6, tp=2, pp=2, dp=1, micro_batches=1)
    slow = replace(plan, devices=(replace(plan.devices[0], p=0.5), *plan.devices[1:]))
    cost = default_duration(slow, split_backward=False)
    first, second = slow.instances
    assert (cost(first, Kind.FORWARD), cost(first, Kind.BACKWARD)) == (3.0, 6.0)
    assert (cost(second, Kind.FORWARD), cost(second, Kind.BACKWARD)) == (1.5, 3.0)
    assert default_duration(slow, split_backward=True)(second, Kind.BACKWARD) == 1.5
    program = program_of(slow)
    timeline = dry_run(program, lambda i, a: cost(i, a.kind) if a.kind in COMPUTE else 0.0)
    assert timeline.makespan == 3 + 1.5 + 3 + 6
    assert timeline.idle_ratio(second) == pytest.approx(1 - 4.5 / 13.5)


@both
@pytest.mark.parametrize("damage", ["drop", "repeat", "peer", "micro-batch", "swap", "late"])
def test_damaged_programs_are_refused_and_the_cell_is_marked(damage: str, split: bool) -> None:
    refused = 0
    for seed in range(40):
        random = Random(seed)
        plan = random_plan(seed)
        program = program_of(plan, split)
        instance = random.choice(program.instances)
        actions = list(program.actions(instance))
        at = random.randrange(len(actions))
        if damage == "drop":
            del actions[at]
        elif damage == "repeat":
            actions.insert(random.randrange(at + 1), actions[at])
        elif damage == "late":
            actions.append(actions.pop(0))
        elif damage == "swap":
            swap_around_forward(actions)
        elif damage == "peer":
            retarget(actions)
        elif damage == "micro-batch" and actions[at].micro_batch >= 0:
            actions[at] = replace(actions[at], micro_batch=len(plan.routes))
        if tuple(actions) == program.actions(instance):
            continue  # nothing there to damage
        if damage == "drop" and split and not any(a.kind is Kind.WEIGHT for a in actions):
            continue  # without its only W, an instance runs a whole backward
        with pytest.raises(ProgramError, match=r">>[A-Z]+[0-9.<>]*<<") as error:
            checked(with_actions(program, instance, actions), plan)
        assert re.match(
            rf"(program|deadlock): {instance.replica}\.{instance.stage}", str(error.value)
        )
        refused += 1
    assert refused >= 10


def swap_around_forward(actions: list[Action]) -> None:
    """Puts the first receive behind the forward that needs it."""
    for index, action in enumerate(actions):
        if action.kind is Kind.RECV_FORWARD:
            actions[index : index + 2] = actions[index : index + 2][::-1]
            return


def retarget(actions: list[Action]) -> None:
    """Gives the first transfer another end."""
    for index, action in enumerate(actions):
        if action.peer is not None:
            peer = replace(action.peer, replica=action.peer.replica + 1)
            actions[index] = replace(action, peer=peer)
            return


def test_a_deadlock_names_who_waits_for_what() -> None:
    """Each list is in order for each micro-batch; together they wait for each other."""
    plan = uniform_plan(num_layers=2, tp=1, pp=2, dp=1, micro_batches=2)
    text = (
        "0.0: F0 SF0>0.1 RB0<0.1 B0 F1 SF1>0.1 RB1<0.1 B1 SYNC STEP\n"
        "0.1: RF1<0.0 F1 B1 SB1>0.0 RF0<0.0 F0 B0 SB0>0.0 SYNC STEP\n"
    )
    with pytest.raises(ProgramError) as error:
        checked(Program.from_text(text), plan)
    lines = str(error.value).splitlines()
    assert lines[0] == "deadlock: 0.0 waits at RB0<0.1; 0.1 waits at RF1<0.0"
    around = "0.0 F0 SF0>0.1 >>RB0<0.1<< B0 F1 SF1>0.1 RB1<0.1 B1 SYNC"
    assert " ".join(lines[2].split()) == around
    assert lines[3].split()[1] == ">>RF1<0.0<<"


def test_instances_must_be_those_of_the_plan() -> None:
    program = program_of(PLAN)
    fewer = replace(program, lists=program.lists[:-1])
    with pytest.raises(ProgramError, match=r"not the plan's: 1\.3"):
        checked(fewer, PLAN)
    with pytest.raises(ProgramError, match="in another order"):
        checked(replace(program, lists=program.lists[::-1]), PLAN)


def test_a_slow_transfer_delays_who_waits_for_it_and_not_who_sends() -> None:
    plan = uniform_plan(num_layers=2, tp=1, pp=2, dp=1, micro_batches=1)

    def cost(instance: Instance, action: Action) -> float:
        return 10.0 if action.kind is Kind.SEND_FORWARD else compute_cost(instance, action)

    spans = {str(span.action): span for span in dry_run(program_of(plan), cost).spans}
    assert (spans["SF0>0.1"].start, spans["SF0>0.1"].end) == (1.0, 11.0)
    assert spans["RF0<0.0"].end == 11.0
    assert spans["STEP"].end == 1 + 10 + 1 + 2 + 2


@pytest.mark.parametrize(
    "text", ["F", "3", "F-1", "f3", "SF3", "SF3<0.1", "RF3>0.1", "F3>0.1", "SYNC1", "F3 B3", ""]
)
def test_what_is_no_action(text: str) -> None:
    with pytest.raises(PlanError, match="is not an action"):
        Action.parse(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.0 F0\n", "line 1"),
        ("0.0: F0\n0.0: B0\n", "line 2: 0.0 has a line already"),
        ("0.0: F0\nx.1: B0\n", "line 2"),
        ("0.0: F0 G1\n", "'G1' is not an action"),
    ],
)
def test_what_is_no_program(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        Program.from_text(text)


def test_actions_that_make_no_sense() -> None:
    peer = Instance(replica=0, stage=0)
    for kind, micro_batch, end in (
        (Kind.FORWARD, -1, None),
        (Kind.SYNC, 0, None),
        (Kind.SEND_FORWARD, 0, None),
        (Kind.FORWARD, 0, peer),
    ):
        with pytest.raises(PlanError, match="action"):
            Action(kind=kind, micro_batch=micro_batch, peer=end)


def test_grids() -> None:
    plan = uniform_plan(num_layers=2, tp=1, pp=2, dp=1, micro_batches=2)
    program = program_of(plan)
    assert compute_grid(program).splitlines() == [
        "    0  1  2  3",
        "0.0 F0 F1 B0 B1",
        "0.1 F0 B0 F1 B1",
    ]
    cell = Cell(instance=Instance(replica=0, stage=1), index=1)
    assert ">>F0<<" in grid(program, {cell}).splitlines()[2]
    assert grid(Program(lists=())) == ""
