"""What holds of every plan and every program made from one, by Hypothesis."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from interpreter import RefusedError, interpret
from plans import plans

from resihp_ext.plan.action import COMPUTE, RECEIVES, Action, Kind
from resihp_ext.plan.check import checked
from resihp_ext.plan.clock import room_of
from resihp_ext.plan.dry_run import dry_run, peak_in_flight
from resihp_ext.plan.fifo import received_in_order
from resihp_ext.plan.grid import compute_grid
from resihp_ext.plan.plan import Instance, Plan, PlanError
from resihp_ext.plan.program import Program, ProgramError
from resihp_ext.plan.schedule import one_forward_one_backward

pytestmark = pytest.mark.unit

FORMS = {"whole": {}, "split": {"split_backward": True}, "evaluation": {"forward_only": True}}
forms = st.sampled_from(sorted(FORMS))


def is_evaluation(form: str) -> bool:
    return form == "evaluation"


@given(plan=plans())
def test_plans_are_valid_and_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.validated().to_json()) == plan
    assert Plan.from_json(plan.to_json()).digest == plan.digest
    groups = [plan.chunks(host) for host in plan.hosts]
    assert sorted(i for group in groups for i in group) == list(plan.instances)
    for group in groups:
        assert len({(i.replica, plan.stage(i).ranks) for i in group}) == 1
        for rank in plan.stage(group[0]).ranks:
            assert plan.instances_of(rank) == group
            assert plan.instance_of(rank) == plan.host_of(group[-1]) == group[0] == min(group)
    assert not any(map(plan.instances_of, plan.standby))
    held = [rank for host in plan.hosts for rank in plan.stage(host).ranks]
    assert sorted([*held, *plan.standby]) == [device.rank for device in plan.devices]


def test_plans_of_all_kinds_are_drawn() -> None:
    kinds: Counter[str] = Counter()

    @given(plan=plans())
    @settings(max_examples=200)
    def draw(plan: Plan) -> None:
        maps = {tuple(stage.layers for stage in one.stages) for one in plan.replicas}
        visited = {instance for route in plan.routes for instance in route}
        kinds.update(
            chunks=len(plan.hosts) < len(plan.instances),
            crossing=any(len({i.replica for i in route}) > 1 for route in plan.routes),
            local=any(
                plan.host_of(one) == plan.host_of(two)
                for route in plan.routes
                for one, two in pairwise(route)
            ),
            maps=len(maps) > 1,
            degrees=len({plan.stage(host).tp for host in plan.hosts}) > 1,
            standby=bool(plan.standby),
            unvisited=visited != set(plan.instances),
        )

    draw()
    assert min(kinds.values()) > 20, kinds


@given(plan=plans(), form=forms)
@settings(max_examples=200)
def test_programs_are_valid_run_and_round_trip(plan: Plan, form: str) -> None:
    program = one_forward_one_backward(plan, **FORMS[form])
    checked(program, plan, forward_only=is_evaluation(form))
    interpret(program, plan, forward_only=is_evaluation(form))
    assert Program.from_text(program.to_text()) == program
    assert program == one_forward_one_backward(Plan.from_json(plan.to_json()), **FORMS[form])
    rooms = room_of(plan)
    for host in plan.hosts:
        assert peak_in_flight(program, host) <= rooms.get(host, 0)
    rows = compute_grid(program).splitlines()[1:]
    assert [row.split()[0] for row in rows] == [program.head(host) for host in plan.hosts]


@given(plan=plans(), form=forms)
@settings(max_examples=60)
def test_the_clock_of_the_dry_run_counts_every_action_once(plan: Plan, form: str) -> None:
    program = one_forward_one_backward(plan, **FORMS[form])
    asked: Counter[tuple[Instance, Kind]] = Counter()

    def cost(instance: Instance, action: Action) -> float:
        asked[instance, action.kind] += 1
        return plan.stage(instance).depth if action.kind in COMPUTE else 0.0

    timeline = dry_run(program, cost)
    visits = Counter(instance for route in plan.routes for instance in route)
    for instance in plan.instances:
        assert asked[instance, Kind.FORWARD] == visits[instance]
    assert len(timeline.spans) == sum(len(actions) for _, actions in program.lists)
    passes = {"whole": 2, "split": 3, "evaluation": 1}[form]
    busiest = max(
        passes * sum(visits[i] * plan.stage(i).depth for i in plan.chunks(host))
        for host in plan.hosts
    )
    alone = min(passes, 2) * plan.num_layers  # weight gradients may overlap
    assert max(busiest, alone) <= timeline.makespan
    assert all(0 <= timeline.idle_ratio(host) <= 1 for host in plan.hosts)


EDITS = (
    "drop",
    "repeat",
    "move",
    "swap",
    "micro-batch",
    "chunk",
    "peer",
    "kind",
    "receives",
    "visit",
)


@st.composite
def edited(draw: st.DrawFn, program: Program, plan: Plan) -> Program:
    """One list changed in one place, or two; not always to something invalid."""
    host = draw(st.sampled_from([host for host, actions in program.lists if actions]))
    actions = list(program.actions(host))
    places = st.integers(0, len(actions) - 1)
    at, other, edit = draw(places), draw(places), draw(st.sampled_from(EDITS))
    action = actions[at]
    if edit == "drop":
        del actions[at]
    elif edit == "repeat":
        actions.insert(other, action)
    elif edit == "move":
        actions.insert(other, actions.pop(at))
    elif edit == "swap":
        actions[at], actions[other] = actions[other], actions[at]
    elif edit in ("receives", "visit"):
        # Two receives, or two actions of one micro-batch: where order matters most.
        alike = [
            index
            for index, each in enumerate(actions)
            if (
                each.kind in RECEIVES
                if edit == "receives"
                else each.micro_batch == action.micro_batch
            )
        ]
        assume(len(alike) > 1)
        one, two = draw(st.permutations(alike))[:2]
        actions[one], actions[two] = actions[two], actions[one]
    else:
        actions[at] = draw(changed(action, plan, edit))
    lists = {**dict(program.lists), host: tuple(actions)}
    return replace(program, lists=tuple(sorted(lists.items())))


def changed(action: Action, plan: Plan, field: str) -> st.SearchStrategy[Action]:
    values = {
        "micro-batch": ("micro_batch", st.integers(0, len(plan.routes))),
        "chunk": ("chunk", st.integers(0, 2)),
        "peer": ("peer", st.sampled_from(plan.instances)),
        "kind": ("kind", st.sampled_from(Kind)),
    }
    name, choices = values[field]

    def change(value: object) -> Action | None:
        try:
            return replace(action, **{name: value})
        except PlanError:
            return None

    return choices.map(change).filter(lambda made: made is not None)


def test_edits_are_refused_exactly_when_the_program_cannot_run() -> None:
    verdicts: Counter[bool] = Counter()

    @given(data=st.data(), plan=plans(), form=forms)
    @settings(max_examples=400)
    def compare(data: st.DataObject, plan: Plan, form: str) -> None:
        program = one_forward_one_backward(plan, **FORMS[form])
        damaged = data.draw(edited(program, plan))
        try:
            interpret(damaged, plan, forward_only=is_evaluation(form))
        except RefusedError:
            verdicts[False] += 1
            with pytest.raises(ProgramError):
                checked(damaged, plan, forward_only=is_evaluation(form))
        else:
            verdicts[True] += 1
            checked(damaged, plan, forward_only=is_evaluation(form))

    compare()
    assert verdicts[False] > 200
    assert verdicts[True] > 20


@given(data=st.data(), plan=plans(), form=forms)
@settings(max_examples=100)
def test_receives_are_put_in_order_and_nothing_else_moves(
    data: st.DataObject, plan: Plan, form: str
) -> None:
    """Late receives are the worst for order: each directly before what needs it."""
    program = one_forward_one_backward(plan, **FORMS[form])
    late = replace(
        program, lists=tuple((host, late_receives(actions)) for host, actions in program.lists)
    )
    assert received_in_order(late) == received_in_order(received_in_order(late))
    checked(received_in_order(late), plan, forward_only=is_evaluation(form))


def late_receives(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    needed_by = {Kind.RECV_FORWARD: Kind.FORWARD, Kind.RECV_BACKWARD: Kind.BACKWARD}
    receives = {
        (needed_by[each.kind], each.micro_batch, each.chunk): each
        for each in actions
        if each.kind in RECEIVES
    }
    moved: list[Action] = []
    for each in actions:
        receive = receives.get((each.kind, each.micro_batch, each.chunk))
        moved += [receive] * (receive is not None)
        moved += [each] * (each.kind not in RECEIVES)
    return tuple(moved)
