"""What the detector makes of records and programs: arrays, and the longest path."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from resihp_ext.cost.model_shape import MODELS
from resihp_ext.detector.detector import Detector
from resihp_ext.detector.itp import Walk
from resihp_ext.detector.reader import Reader
from resihp_ext.detector.scene import Scene, ragged_plan
from resihp_ext.detector.series import Run
from resihp_ext.detector.slots import Sample, Slots
from resihp_ext.detector.timed import PackedStep, RankStep, pack
from resihp_ext.plan.action import COMPUTE, RECEIVES, SENDS, Kind
from resihp_ext.plan.plan import Plan, uniform_plan
from resihp_ext.plan.schedule import one_forward_one_backward

pytestmark = pytest.mark.unit

SHAPE = replace(MODELS["llama2-7b"], num_layers=8)
GRID = uniform_plan(num_layers=8, tp=2, pp=2, dp=2, micro_batches=8)
RAGGED = ragged_plan(GRID, seed=1)
VIRTUAL = uniform_plan(num_layers=8, tp=1, pp=2, dp=2, micro_batches=8, virtual=2)
PLANS = pytest.mark.parametrize("plan", [GRID, RAGGED, VIRTUAL], ids=["grid", "ragged", "virtual"])


def slots_of(plan: Plan) -> Slots:
    return Slots(plan, one_forward_one_backward(plan))


def records(plan: Plan) -> dict[int, RankStep]:
    return Run(Scene(plan=plan, shape=SHAPE, noise=0.02, faults=(), steps=1, seed=3)).walk(1)


def packed(slots: Slots, steps: dict[int, RankStep]) -> dict[int, PackedStep]:
    return {r: pack(s, slots.keys[slots.host_of_rank[r]]) for r, s in steps.items()}


def assert_equal(one: Sample, other: Sample) -> None:
    for name in Sample.__slots__:
        assert np.array_equal(getattr(one, name), getattr(other, name), equal_nan=True), name


def longest_path(slots: Slots, node_s: np.ndarray, wire_s: np.ndarray) -> float:
    """From the definition: an action follows the one before it, a receive its send as well."""
    program = slots.program
    sender = {
        program.message(host, a): (host, i)
        for host, actions in program.lists
        for i, a in enumerate(actions)
        if a.kind in SENDS
    }
    lists, known = dict(program.lists), {}

    def end(host, i):  # type: ignore[no-untyped-def]
        if i < 0:
            return 0.0
        if (host, i) not in known:
            action, node = lists[host][i], slots.first_node[host] + i
            ready = end(host, i - 1)
            if action.kind in RECEIVES:
                sent = end(*sender[program.message(host, action)])
                ready = max(ready, sent + wire_s[node])
            known[host, i] = ready + (node_s[node] if action.kind in COMPUTE else 0.0)
        return known[host, i]

    pipeline = (Kind.SYNC, Kind.STEP)
    return max(
        end(host, i)
        for host, actions in lists.items()
        for i, a in enumerate(actions)
        if a.kind not in pipeline
    )


@PLANS
def test_walk_is_the_longest_path(plan: Plan) -> None:
    slots, numbers = slots_of(plan), np.random.default_rng(0)
    walk = Walk(slots.program, slots.first_node)
    for wires in (0.0, 0.1, 3.0):
        node_s = numbers.uniform(0.5, 2.0, slots.nodes)
        wire_s = wires * numbers.uniform(0.5, 2.0, slots.nodes)
        busy = np.where(walk.work >= 0, node_s[walk.work], 0.0)
        under_way = np.where(walk.receive >= 0, wire_s[walk.receive], 0.0)
        expected = longest_path(slots, node_s, wire_s)
        assert walk.seconds(busy, under_way) == pytest.approx(expected)


@PLANS
def test_slots_hold_the_measured_times(plan: Plan) -> None:
    slots, steps = slots_of(plan), records(plan)
    sample = Reader(slots).read(steps)
    for rank, step in steps.items():
        for a in step.actions:
            slot = slots.slot(rank, (a.kind, a.micro_batch, a.chunk))
            found = sample.start_s[slot], sample.own_s[slot], sample.wait_s[slot]
            assert found == (a.start_s, a.own_s, a.wait_s)
        assert sample.total_s[slots.index_of[rank]] == step.total_s
        for m in step.micro_batches:
            assert (sample.tokens[m.number], sample.squared[m.number]) == (m.tokens, m.squared)


@PLANS
def test_packed_steps_lose_nothing(plan: Plan) -> None:
    slots, steps = slots_of(plan), records(plan)
    wire = msgspec.msgpack.encode(packed(slots, steps))
    arrived = msgspec.msgpack.decode(wire, type=dict[int, PackedStep])
    assert_equal(Reader(slots).read(arrived), Reader(slots).read(steps))


def test_order_of_execution_is_the_executors_business() -> None:
    slots, steps = slots_of(GRID), records(GRID)
    turned = {r: msgspec.structs.replace(s, actions=s.actions[::-1]) for r, s in steps.items()}
    expected = Reader(slots).read(steps)
    assert_equal(Reader(slots).read(turned), expected)
    assert_equal(Reader(slots).read(packed(slots, turned)), expected)


def test_missing_ranks_and_actions_are_not_measured() -> None:
    slots, steps = slots_of(GRID), records(GRID)
    del steps[5]
    steps[0] = msgspec.structs.replace(steps[0], actions=steps[0].actions[1:])
    for one in (steps, packed(slots, steps)):
        sample = Reader(slots).read(one)
        missing = np.flatnonzero(np.isnan(sample.own_s))
        first = slots.first_slot[slots.index_of[0]]
        mine = np.flatnonzero(slots.rank_of == slots.index_of[5])
        assert set(missing) == {first, *mine}
        assert np.isnan(sample.total_s).sum() == 1


def test_foreign_packed_steps_are_left() -> None:
    slots, steps = slots_of(GRID), records(GRID)
    good = packed(slots, steps)
    odd = dict(good)
    odd[0] = msgspec.structs.replace(good[0], times=good[0].times[:-24], micro_batches=b"123")
    odd[99] = good[1]
    work = np.array([-1, 1, 1, 8, 1, 1], dtype="<i8").tobytes()
    odd[1] = msgspec.structs.replace(good[1], micro_batches=work)
    sample, expected = Reader(slots).read(odd), Reader(slots).read(steps)
    assert set(slots.rank_of[np.isnan(sample.own_s)]) == {slots.index_of[0]}
    assert np.array_equal(sample.total_s, expected.total_s)
    assert np.array_equal(sample.tokens, expected.tokens)


def test_detector_takes_packed_steps() -> None:
    one = Scene(plan=GRID, shape=SHAPE, noise=0.02, faults=(), steps=18, seed=3)
    plain, other = Detector(GRID), Detector(GRID)
    for step, steps in Run(one):
        report = plain.observe(step, steps)
        again = other.observe(step, packed(other.slots, steps))
    assert report.ratio == again.ratio
    assert 0.9 < report.ratio < 1.1
