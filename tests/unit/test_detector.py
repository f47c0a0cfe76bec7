"""The detector on emulated steps whose faults are known."""

from dataclasses import replace

import numpy as np
import pytest

from resihp_ext.cost.model_shape import MODELS
from resihp_ext.detector.config import DetectorConfig
from resihp_ext.detector.detector import Detector
from resihp_ext.detector.greyhound import Greyhound
from resihp_ext.detector.scene import Fault, Scene, draw_scene
from resihp_ext.detector.series import Run
from resihp_ext.detector.suspect import Report
from resihp_ext.errors import UserError
from resihp_ext.plan.plan import uniform_plan

pytestmark = pytest.mark.unit

SHAPE = replace(MODELS["llama2-7b"], num_layers=8)


def scene(*faults: Fault, tp: int = 2, steps: int = 50, noise: float = 0.02) -> Scene:
    plan = uniform_plan(num_layers=8, tp=tp, pp=2, dp=2, micro_batches=8, devices_per_node=2 * tp)
    return Scene(plan=plan, shape=SHAPE, noise=noise, faults=faults, steps=steps, seed=3)


def fault(kind: str, ranks: tuple[int, ...], factor: float = 1.5, end: int = 1000) -> Fault:
    return Fault(kind=kind, ranks=ranks, factor=factor, onset=30, end=end)  # type: ignore[arg-type]


def reports(one: Scene) -> list[Report]:
    detector = Detector(one.plan)
    return [detector.observe(step, records) for step, records in Run(one)]


@pytest.mark.parametrize(
    ("kind", "ranks"), [("device", (3,)), ("link", (1, 5)), ("host", (0, 1, 2, 3))]
)
def test_culprit_is_named_once_and_recovers(kind: str, ranks: tuple[int, ...]) -> None:
    found = reports(scene(fault(kind, ranks, end=42)))
    suspects = [(r.step, s) for r in found for s in r.suspects]
    assert [(s.kind, s.ranks) for _, s in suspects] == [(kind, ranks)]
    step, suspect = suspects[0]
    assert 32 <= step <= 34
    assert abs(suspect.since_step - 30) <= 1
    assert suspect.p == pytest.approx(1 / 1.5, rel=0.1)
    assert "1." in suspect.evidence
    assert [r.recovered for r in found if r.recovered] == [ranks]


def test_a_node_whose_devices_are_a_little_late_is_not_blamed_for_one_of_them() -> None:
    late = [fault("device", (rank,), 1.11) for rank in (0, 1, 2)]
    found = reports(scene(fault("device", (3,), 2.1), *late))
    assert [(s.kind, s.ranks) for r in found for s in r.suspects] == [("device", (3,))]


def test_healthy_run_is_quiet_and_predicted() -> None:
    found = reports(scene())
    assert not any(r.suspects or r.unexplained or r.recovered for r in found)
    ratios = [r.ratio for r in found[20:]]
    assert np.mean(np.abs(np.array(ratios) - 1)) < 0.03


def test_device_that_is_slow_from_the_start_is_outvoted() -> None:
    slow = Fault(kind="device", ranks=(2,), factor=1.6, onset=1, end=1000)
    suspects = [s for r in reports(scene(slow, steps=25)) for s in r.suspects]
    assert [(s.kind, s.ranks) for s in suspects] == [("device", (2,))]


def test_healthy_verdict_pardons_the_level_and_slow_verdict_silences_it() -> None:
    one = scene(fault("device", (3,)), steps=60)
    for p in (1.0, 1 / 1.5):
        detector, suspects = Detector(one.plan), 0
        for step, records in Run(one):
            report = detector.observe(step, records)
            suspects += len(report.suspects)
            if report.suspects:
                detector.confirm({3: p})
        assert suspects == 1


def test_further_slowdown_of_a_known_device_is_reported() -> None:
    more = Fault(kind="device", ranks=(3,), factor=1.6, onset=40, end=1000)
    steps = [r.step for r in reports(scene(fault("device", (3,)), more)) if r.suspects]
    assert len(steps) == 2
    assert steps[1] in (42, 43)


def test_missing_repeated_broken_and_foreign_records_change_nothing() -> None:
    one = scene(fault("device", (3,)), steps=45)
    detector, found = Detector(one.plan), []
    for step, records in Run(one):
        records = dict(records)
        if step % 3 == 0:
            del records[5]
        if step % 4 == 0:
            broken = replace_own(records[1])
            records[1] = broken
        found += detector.observe(step, records).suspects
        again = detector.observe(step, records)
        assert not again.suspects
        assert np.isnan(again.ratio)
        assert np.isnan(detector.observe(step + 1, {}).ratio)
    assert [s.ranks for s in found] == [(3,)]


def replace_own(record):  # type: ignore[no-untyped-def]
    import msgspec

    actions = tuple(msgspec.structs.replace(a, own_s=float("nan")) for a in record.actions[:3])
    return msgspec.structs.replace(record, actions=actions + record.actions[3:])


def test_set_clock_is_no_slow_link() -> None:
    one, suspects = scene(), []
    detector, run = Detector(one.plan), Run(one)
    for step in range(1, 46):
        if step == 25:
            run.set_clock(0, 3.0)
        suspects += detector.observe(step, run.walk(step)).suspects
    assert not suspects


def test_fits_are_carried_to_another_layout() -> None:
    detector = Detector(scene().plan)
    for step, records in Run(scene(steps=25)):
        detector.observe(step, records)
    other = replace(scene(tp=4, steps=30), seed=9)
    plan = other.plan.next_version()
    detector.adopt(plan)
    ratios, suspects = [], 0
    for step, records in Run(replace(other, plan=plan)):
        report = detector.observe(25 + step, records)
        ratios.append(report.ratio)
        suspects += len(report.suspects)
    assert not suspects
    assert np.isnan(ratios[0])
    assert np.abs(np.array(ratios[10:]) - 1).mean() < 0.05


def test_greyhound_takes_heavier_batches_for_slow_devices() -> None:
    """Work that grows is in our prediction, and not in raw times."""
    steps = {"ours": 0, "greyhound": 0}
    one = replace(scene(steps=80), shape=replace(SHAPE, seq_length=32768))
    judges = {"ours": Detector(one.plan), "greyhound": Greyhound(one.plan)}
    run = Run(one)
    for step in range(1, 81):
        run.one_document = step > 45
        records = run.walk(step)
        for name, judge in judges.items():
            report = judge.observe(step, records)
            steps[name] += bool(report.suspects or report.unexplained)
    assert steps["ours"] == 0
    assert steps["greyhound"] == 1


def test_equal_seeds_give_equal_runs() -> None:
    one, other = (replace(draw_scene(5), steps=3) for _ in range(2))
    assert one == other
    assert list(Run(one)) == list(Run(other))
    assert list(Run(one)) != list(Run(replace(draw_scene(6), steps=3)))


def test_settings_are_checked() -> None:
    with pytest.raises(UserError, match="above 1"):
        DetectorConfig(device_over_ratio=0.9)
    with pytest.raises(UserError, match="settle_steps"):
        DetectorConfig(settle_steps=0)
