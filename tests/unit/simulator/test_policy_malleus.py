"""Malleus as a policy: when it plans, and that its plans are what its programs demand."""

from random import Random

import pytest
from straggler_views import Told, job, ranks_of

from resihp_ext.scheduler.predict import memory_bytes
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.policies.malleus import Malleus
from resihp_ext.simulator.policy import Cause, Undone
from resihp_ext.simulator.pricing import Pricing
from resihp_ext.simulator.tp_groups import Node, cuts_of

pytestmark = pytest.mark.unit

GROUPS = ((0, 1, 2, 3), (4, 5, 6, 7))
NODE = Node(tuple(range(8)), GROUPS)


def rate(degree: int, p: float) -> float:
    """Hetu's measured ratios: a group of half the size takes 1.9 times as long."""
    return p / {4: 1.0, 2: 1.9, 1: 3.66}[degree]


def test_a_straggler_is_cut_out_of_its_group() -> None:
    most, falling, single, nominal = cuts_of(NODE, {5: 0.1}, 4, (1, 2, 4), rate)
    # 3/3.66 is more than 1/1.9 + 1/3.66; Hetu looks at falling powers only.
    assert most.full == falling.full == (GROUPS[0],)
    assert most.rest == ((4,), (6,), (7,), (5,))
    assert falling.rest == ((4, 6), (7,))
    assert single.rest == ((4, 6),)
    assert nominal.full == GROUPS


def test_a_mild_straggler_stays_in_its_group_for_the_fastest_single_one() -> None:
    _, single, *_ = cuts_of(NODE, {5: 0.8}, 4, (1, 2, 4), rate)
    assert single.rest == ((4, 5, 6, 7),)


def test_of_a_dead_node_nothing_is_left() -> None:
    (cut,) = cuts_of(NODE, dict.fromkeys(range(8), 0.0), 4, (1, 2, 4), rate)
    assert (cut.full, cut.rest) == ((), ())


def test_it_plans_when_a_ratio_has_moved() -> None:
    told = Told(Malleus(), job())
    begun = told.layout
    # 1 / 0.8 = 1.25: moved by less than 0.3.
    assert told.of(Cause.SLOW, {0: 0.8}).layout is begun
    slow = told.of(Cause.SLOW, {0: 0.5})
    assert slow.layout is not begun
    assert slow.undone is Undone.NOTHING
    assert slow.moved_bytes > 0
    planned = told.layout
    assert told.of(Cause.SLOW, {0: 0.45}).layout is planned
    told.of(Cause.BACK)
    assert told.plan == told.setting.nominal


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_valid_fit_and_are_no_slower_than_staying(seed: int) -> None:
    random = Random(seed)
    setting = job(dp=2, micro_batches=32, spares=8 * random.randint(0, 1))
    ranks = random.sample(range(32), random.randint(1, 5))
    p = {rank: random.choice([0.0, 0.1, 0.3, 0.5, 0.7]) for rank in ranks}
    told = Told(Malleus(), setting)
    told.of(Cause.DEAD if 0.0 in p.values() else Cause.SLOW, p)
    health = Health.of(p)
    pricing = Pricing(setting, health)
    assert max(memory_bytes(pricing.problem, told.plan).values()) <= setting.cluster.memory_bytes
    for one in told.plan.replicas:
        assert all(stage.tp in (1, 2, 4) for stage in one.stages)
    if not health.dead:
        assert pricing.iteration_s(told.plan) <= pricing.iteration_s(setting.nominal)
    told.of(Cause.BACK)
    assert told.plan == setting.nominal


def test_a_death_breaks_off_a_step_and_moves_state() -> None:
    told = Told(Malleus(), job())
    answer = told.of(Cause.DEAD, {0: 0.0})
    assert answer.undone is Undone.STEP
    assert 0 not in ranks_of(told.plan)
    assert len(told.plan.replicas) == 2
    assert 0 < answer.pause_s < 30


def test_layers_that_nobody_holds_come_from_the_checkpoint() -> None:
    told = Told(Malleus(), job(dp=1, spares=8))
    answer = told.of(Cause.DEAD, {0: 0.0})
    assert answer.layout is not None
    assert answer.undone is Undone.CHECKPOINT


def test_with_too_little_memory_it_waits() -> None:
    told = Told(Malleus(), job(tp=4, pp=2, dp=1, model="llama2-30b"))
    answer = told.of(Cause.DEAD, dict.fromkeys(range(1, 8), 0.0))
    assert answer.layout is None
    told.of(Cause.BACK)
    assert told.plan == told.setting.nominal
