"""Simulated jobs made from the files of emulated ones; calibration by receipts."""

from __future__ import annotations

import pytest

from resihp_ext.cost.cost_model import preset
from resihp_ext.emulation.prices import Prices
from resihp_ext.emulation.scene import Scene, scene_from_yaml
from resihp_ext.emulation.simulated import LOCAL, layout_of, setting_of, squares_of
from resihp_ext.errors import UserError
from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import uniform_plan
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.simulator.calibrate import calibrated
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.iteration import POOL, Iterations

pytestmark = pytest.mark.unit

SCENE: Scene = scene_from_yaml(
    "{model: llama2-7b, hardware: a100, time_scale: 0.5, noise: 0.0}", "scene.yaml"
)
PLAN = uniform_plan(num_layers=4, tp=2, pp=2, dp=2, micro_batches=8)
SEQ = 128


def micro_batches(step: int, replica: int, segments: list[list[int]]) -> dict[str, object]:
    found = [{"tokens": SEQ, "segments": one} for one in segments]
    return {
        "event": "micro_batches",
        "step": step,
        "plan": 0,
        "replica": replica,
        "micro_batches": found,
    }


def test_documents_are_those_of_the_job() -> None:
    events = [micro_batches(3, 1, [[64, 64], [128], [32] * 4, [100, 28]])]
    found = squares_of(events, {0: PLAN}, SCENE, SEQ)
    ratio = SCENE.shape.seq_length / SEQ
    mine = [m for m, route in enumerate(PLAN.routes) if route[0].replica == 1]
    assert found.shape == (8, POOL)
    assert found[mine, 2].tolist() == [
        n * ratio**2 for n in (2 * 64**2, 128**2, 4 * 32**2, 100**2 + 28**2)
    ]
    assert found.sum() == found[mine, 2].sum()


def test_a_step_is_what_the_emulation_waits_out() -> None:
    """The dry run of the job's own program with the emulation's own prices."""
    setting = setting_of(SCENE, PLAN)
    events = [micro_batches(1, replica, [[SEQ]] * 4) for replica in (0, 1)]
    iterations = Iterations(setting, squares_of(events, {0: PLAN}, SCENE, SEQ))
    prices = Prices(SCENE, PLAN, SEQ, LOCAL)
    real_s = dry_run(one_forward_one_backward(PLAN), prices.seconds).makespan
    found = iterations.look(layout_of(PLAN, SCENE), Health()).iteration_s[0]
    assert found == pytest.approx(real_s, rel=1e-9)


def test_a_slow_device_holds_its_group_back() -> None:
    iterations = Iterations(setting_of(SCENE, PLAN))
    layout = layout_of(PLAN, SCENE)
    healthy = iterations.look(layout, Health()).iteration_s.mean()
    slow = iterations.look(layout, Health.of({3: 0.5})).iteration_s.mean()
    assert 1.5 < slow / healthy < 2.0


def test_layers_must_divide() -> None:
    with pytest.raises(UserError, match="32 layers cannot stand behind the 5"):
        setting_of(SCENE, uniform_plan(num_layers=5, tp=1, pp=1, dp=8, micro_batches=8))


def test_the_order_of_work_is_that_of_jobs() -> None:
    plan = layout_of(PLAN, SCENE).plan
    program = layout_of(PLAN, SCENE).schedule.build(plan, lambda *_: 1.0)
    assert program == one_forward_one_backward(PLAN)
    assert Action(kind=Kind.SYNC) in program.lists[0][1]


def receipt(total_s: float, move_s: float, moved_bytes: int) -> dict[str, object]:
    phases = {"agree": total_s - move_s, "move": move_s}
    return {"total_s": total_s, "phases_s": phases, "moved_bytes": moved_bytes}


def test_receipts_calibrate_changes() -> None:
    found = calibrated([receipt(1.0, 0.2, 200), receipt(0.7, 0.1, 100), receipt(3.0, 0.3, 300)])
    assert found.fixed_s == pytest.approx(0.8)
    assert found.bytes_per_s == pytest.approx(1000)
    assert found.seconds(500) == pytest.approx(1.3)
    assert found.applied(preset("a100")).fixed_transition_s == pytest.approx(0.8)
    assert calibrated([receipt(1.0, 0.0, 0)]).seconds(10**9) == 1.0
    with pytest.raises(UserError, match="no receipts"):
        calibrated([])
