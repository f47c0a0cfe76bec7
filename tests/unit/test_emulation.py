"""Emulated devices: what is read, what an action takes, what slow faults leave."""

import pytest

from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.plan_cost import Workload
from resihp_ext.emulation.prices import Prices, Speed, enlarged
from resihp_ext.emulation.scene import scene_from_yaml
from resihp_ext.errors import UserError
from resihp_ext.faults.fault import Fault, Kind
from resihp_ext.faults.lasting import device_left, link_left
from resihp_ext.plan.action import Action
from resihp_ext.plan.action import Kind as Does
from resihp_ext.plan.plan import Instance, uniform_plan

pytestmark = pytest.mark.unit

TEXT = "{model: llama2-7b, hardware: a100, time_scale: 0.5, noise: 0.02, speed: {3: 0.5}}"
FIRST = Instance(replica=0, stage=0)


def forward(micro_batch: int) -> Action:
    return Action(kind=Does.FORWARD, micro_batch=micro_batch)


def prices(text: str = TEXT, layers: int = 4) -> Prices:
    plan = uniform_plan(num_layers=layers, tp=2, pp=2, dp=2, micro_batches=4)
    return Prices(scene_from_yaml(text, "f"), plan, 1024, MemoryPolicy())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{model: llama2-7b, hardware: a100}", "time_scale"),
        (TEXT.replace("a100", "abacus"), "hardware"),
        (TEXT.replace("llama2-7b", "eliza"), "model 'eliza' is unknown"),
        (TEXT.replace("0.5}", "1.5}"), "speed"),
        (TEXT.replace("noise", "loudness"), "loudness"),
        ("[", "f: "),
    ],
)
def test_a_bad_file_is_one_line(text: str, says: str) -> None:
    with pytest.raises(UserError) as caught:
        scene_from_yaml(text, "f")
    assert str(caught.value).startswith("f: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_stand_for_layers() -> None:
    plan = uniform_plan(num_layers=4, tp=1, pp=2, dp=1, micro_batches=2)
    assert enlarged(plan, 32).stage(Instance(replica=0, stage=1)).layers == (16, 32)
    with pytest.raises(UserError, match="30 layers cannot stand behind the 4"):
        enlarged(plan, 30)


def test_a_micro_batch_takes_what_its_tokens_and_segments_say() -> None:
    found = prices()
    full = found.seconds(FIRST, forward(0))
    assert full == pytest.approx(
        found.seconds(FIRST, forward(0), Workload(tokens=1024, squared=1024**2)), rel=1e-6
    )
    halves = found.seconds(FIRST, forward(0), Workload(tokens=1024, squared=2 * 512**2))
    quarters = found.seconds(FIRST, forward(0), Workload(tokens=1024, squared=4 * 256**2))
    assert full > halves > quarters
    # Linear in the sum of squares.
    assert full - halves == pytest.approx(2 * (halves - quarters), rel=1e-6)
    assert prices(TEXT.replace("0.5,", "1.0,")).seconds(FIRST, forward(0)) == pytest.approx(
        2 * full
    )


def test_a_slow_device_takes_longer_and_noise_repeats() -> None:
    scene = scene_from_yaml(TEXT, "f")
    healthy, slow = Speed(scene, 0), Speed(scene, 3)
    assert healthy.seconds(1.0, 5, forward(1)) == Speed(scene, 0).seconds(1.0, 5, forward(1))
    assert healthy.seconds(1.0, 5, forward(1)) != healthy.seconds(1.0, 6, forward(1))
    mean = [
        sum(one.seconds(1.0, k, forward(1)) for k in range(400)) / 400 for one in (healthy, slow)
    ]
    assert mean == pytest.approx([1.0, 2.0], rel=0.01)
    sync = Action(kind=Does.SYNC)
    assert slow.seconds(1.0, 5, sync) == pytest.approx(1.0, rel=0.2), "the network is not slow"


def test_faults_last_from_step_to_step_and_multiply() -> None:
    faults = [
        Fault(at_step=5, until_step=8, kind=Kind.SLOW, rank=2, factor=0.5),
        Fault(at_step=6, kind=Kind.SLOW, node="b", factor=0.5),
        Fault(at_step=6, kind=Kind.SLOW_LINK, link=("a", "b"), factor=0.25),
    ]
    found = [device_left(faults, 2, "b", step) for step in range(4, 10)]
    assert found == [1.0, 0.5, 0.25, 0.25, 0.5, 0.5]
    assert device_left(faults, 1, "a", 7) == 1.0
    assert link_left(faults, "b", "a", 6) == link_left(faults, "a", "b", 6) == 0.25
    assert link_left(faults, "a", "c", 6) == link_left(faults, "a", "b", 5) == 1.0
