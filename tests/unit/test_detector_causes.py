"""What the detector once took for slowness, or did not see, case by case."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from resihp_ext.cost.model_shape import MODELS
from resihp_ext.detector.attribute import device_suspects, link_suspects
from resihp_ext.detector.bocd import BocdConfig
from resihp_ext.detector.config import DetectorConfig
from resihp_ext.detector.detector import Detector
from resihp_ext.detector.reader import Reader
from resihp_ext.detector.scene import Fault, Scene
from resihp_ext.detector.series import Run
from resihp_ext.detector.slots import Slots
from resihp_ext.detector.suspect import Report
from resihp_ext.detector.transfers import Transfers
from resihp_ext.detector.verify import Changes
from resihp_ext.detector.watch import Rise, Watch
from resihp_ext.plan.plan import Plan, Replica, uniform_plan
from resihp_ext.plan.schedule import one_forward_one_backward

pytestmark = pytest.mark.unit

SHAPE = replace(MODELS["llama2-7b"], num_layers=8)


def plan_of(tp: int = 2) -> Plan:
    return uniform_plan(num_layers=8, tp=tp, pp=2, dp=2, micro_batches=8, devices_per_node=2 * tp)


def scene(*faults: Fault, steps: int = 60) -> Scene:
    return Scene(plan=plan_of(), shape=SHAPE, noise=0.02, faults=faults, steps=steps, seed=3)


def with_totals(factor: Callable[[int], float]) -> list[Report]:
    """A healthy run whose iterations last longer for no measured reason."""
    one = scene()
    detector, found = Detector(one.plan), []
    for step, records in Run(one):
        longer = {
            rank: msgspec.structs.replace(record, total_s=record.total_s * factor(step))
            for rank, record in records.items()
        }
        found.append(detector.observe(step, longer))
    return found


def test_what_is_over_again_is_no_slow_iteration() -> None:
    found = with_totals(lambda step: 2.5 if 45 <= step < 49 else 1.0)
    assert not [r.step for r in found if r.unexplained]
    lasting = with_totals(lambda step: 2.5 if step >= 45 else 1.0)
    assert [r.step for r in lasting if r.unexplained] == [49]


def test_an_iteration_that_always_was_above_its_prediction_is_not_slow_for_a_little_more() -> None:
    # The prediction does not follow what jitter adds beyond 15 %.
    config = BocdConfig()
    for later, slow in ((1.65, False), (2.0, True)):
        detector = Detector(plan_of())
        changes = Changes(config, ratio=0.1, distance=10)
        found = [changes.observe(1.4 + 0.02 * (i % 3)) for i in range(60)]
        found += [changes.observe(later + 0.02 * (i % 3)) for i in range(20)]
        verdicts = [detector.is_slow(change, later) for change in found if change is not None]
        assert any(verdicts) is slow


def watched(rows: Sequence[Sequence[float]], over_ratio: float = 1.15) -> tuple[Watch, list[Rise]]:
    """A watch after some steps, and what rose in the last one."""
    watch, rises = Watch(len(rows[0]), over_ratio, DetectorConfig()), []
    watch.settle(np.ones((12, len(rows[0]))))
    for step, row in enumerate(rows, 1):
        rises, _ = watch.observe(step, np.array(row))
    return watch, rises


@pytest.mark.parametrize(
    "rows",
    [
        [(1.18, 1.11, 1.13, 1.25), (1.16, 1.15, 1.13, 1.24), (1.16, 1.06, 1.10, 1.17)],
        # A ramp, with two odd steps of the first device on it.
        [(4.96, 1.30, 1.30, 1.30), (4.43, 1.31, 1.31, 1.31), (1.40, 1.42, 1.41, 1.40)],
    ],
)
def test_odd_steps_of_a_device_do_not_hide_its_slow_node(rows: list[tuple[float, ...]]) -> None:
    plan = plan_of()
    slots = Slots(plan, one_forward_one_backward(plan))
    node_of = {d.rank: d.node for d in plan.devices}
    node = [r for r in slots.ranks if node_of[r] == 0]
    full = np.ones((len(rows), len(slots.ranks)))
    full[:, [slots.index_of[r] for r in node]] = rows
    watch, rises = watched(full.tolist())
    suspects = device_suspects(plan, slots, watch, rises)
    assert [(s.kind, s.ranks) for s in suspects] == [("host", tuple(sorted(node)))]


def test_two_odd_steps_of_a_known_slow_device_are_no_news() -> None:
    watch, _ = watched([(2.5,)])
    watch.know([0], 2.5)
    assert not [rise for step, x in enumerate((2.6, 6.2, 9.6), 2) for rise in seen(watch, step, x)]
    assert [r.level for step, x in enumerate((3.4, 3.4, 3.4), 5) for r in seen(watch, step, x)]


def seen(watch: Watch, step: int, value: float) -> list[Rise]:
    return watch.observe(step, np.array([value]))[0]


def test_a_link_behind_a_slower_one_is_not_named_before_it() -> None:
    pairs, healthy_s = ((0, 4), (1, 4)), np.array([1e-3, 1e-3])
    rows = [(1.05, 1.3), (2.5, 1.6), (3.0, 1.8)]
    watch, rises = watched(rows, over_ratio=1.2)
    assert [rise.at for rise in rises] == [1]
    assert not link_suspects(pairs, watch, rises, healthy_s)
    rises, _ = watch.observe(4, np.array([3.0, 1.8]))
    assert [s.ranks for s in link_suspects(pairs, watch, rises, healthy_s)] == [(0, 4)]


def test_a_direction_with_few_messages_says_nothing_of_its_link() -> None:
    one = scene(steps=1)
    slots = Slots(one.plan, one_forward_one_backward(one.plan))
    transfers, (_, records) = Transfers(slots), next(iter(Run(one)))
    sample = Reader(slots).read(records)
    everything = replace(sample, wait_s=np.ones_like(sample.wait_s))
    pair = transfers.pairs[0]
    hops = [hop for hop in slots.hops if hop[0] == pair and hop[1]]
    transfers.settle([everything] * 3, transfers.messages * 1e-3)
    for left, told in ((len(hops) // 2, True), (len(hops) // 2 - 1, False)):
        wait_s = everything.wait_s.copy()
        wait_s[[hop[3] for hop in hops[left:]]] = 0.0
        seconds = transfers.seconds(replace(everything, wait_s=wait_s))
        assert np.isfinite(seconds[0]) == told
        assert np.isfinite(seconds[1:]).all()


def one_way(devices_per_node: int, *faults: Fault) -> Scene:
    """The first stage has seven times the layers of the second, which always waits for it."""
    plan = uniform_plan(
        num_layers=8, tp=2, pp=2, dp=2, micro_batches=8, devices_per_node=devices_per_node
    )
    replicas = tuple(
        Replica(
            stages=tuple(
                replace(stage, layers=layers)
                for stage, layers in zip(one.stages, ((0, 7), (7, 8)), strict=True)
            )
        )
        for one in plan.replicas
    )
    uneven = replace(plan, replicas=replicas).validated()
    return replace(scene(*faults, steps=45), plan=uneven, network=4.0)


@pytest.mark.parametrize("devices_per_node", [4, 8])
def test_a_slow_link_is_found_where_one_direction_is_never_waited_for(
    devices_per_node: int,
) -> None:
    slow = Fault(kind="link", ranks=(1, 5), factor=2.5, onset=30, end=1000)
    one = one_way(devices_per_node, slow)
    detector, suspects = Detector(one.plan), []
    for step, records in Run(one):
        suspects += [(step, s.ranks) for s in detector.observe(step, records).suspects]
    assert [ranks for _, ranks in suspects] == [(1, 5)]
    assert suspects[0][0] in (32, 33)


@pytest.mark.parametrize("node", [0, 1])
def test_a_set_clock_is_no_slow_link_there_either(node: int) -> None:
    one, suspects = one_way(4), []
    detector, run = Detector(one.plan), Run(one)
    for step in range(1, 46):
        if step == 25:
            run.set_clock(node, 3.0)
        suspects += detector.observe(step, run.walk(step)).suspects
    assert not suspects


def test_a_device_of_a_node_that_was_named_on_a_ramp_is_not_named_alone_later() -> None:
    plan = plan_of()
    slots = Slots(plan, one_forward_one_backward(plan))
    node = [slots.index_of[rank] for rank in range(4)]
    watch = Watch(8, 1.15, DetectorConfig())
    watch.settle(np.ones((12, 8)))
    found = []
    ramp = [(1.72, 1.75, 2.11, 1.68)] * 3 + [(2.2, 2.2, 2.2, 2.2)] * 4
    for step, row in enumerate(ramp, 1):
        ratios = np.ones(8)
        ratios[node] = row
        rises, _ = watch.observe(step, ratios)
        found += [(s.kind, s.ranks) for s in device_suspects(plan, slots, watch, rises)]
    assert found == [("host", (0, 1, 2, 3))] * 2


def test_what_other_links_do_now_and_then_is_no_slow_link() -> None:
    for busy in (True, False):
        watch = Watch(8, 1.2, DetectorConfig(), chance=1e-6)
        watch.settle(np.ones((12, 8)))
        random, found = np.random.default_rng(1), []
        for step in range(1, 101):
            row = np.where(random.random(8) < (0.04 if busy else 0.0), 2.0, 1.0)
            row[0] = 1.5 if step > 97 else 1.0
            found += [rise.at for rise in watch.observe(step, row)[0]]
        assert found == ([] if busy else [0])
