"""Random faults: laws with the means they promise, the same bytes for a seed, overlaps."""

from itertools import pairwise
from math import inf

import numpy as np
import pytest

from resihp_ext.cost.cluster import uniform_cluster
from resihp_ext.errors import UserError
from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.laws import LEFT, Form, Law, Severity, Source, Target, sample
from resihp_ext.simulator.spells import Spell, happenings_of

pytestmark = pytest.mark.unit

HOUR_S = 3600.0
CLUSTER = uniform_cluster(nodes=4, devices_per_node=8, memory_bytes=2**30)


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (Form.FIXED, 1.0),
        (Form.EXPONENTIAL, 1.0),
        (Form.WEIBULL, 0.7),
        (Form.LOG_NORMAL, 0.8),
        (Form.NORMAL, 0.2),
    ],
)
def test_a_law_has_its_mean(form: Form, shape: float) -> None:
    law = Law(mean_s=1000.0, form=form, shape=shape)
    rng = np.random.default_rng(0)
    drawn = [law.draw(rng) for _ in range(20_000)]
    assert np.mean(drawn) == pytest.approx(1000.0, rel=0.03)
    assert min(drawn) >= 1.0


def test_a_law_refuses_nonsense() -> None:
    with pytest.raises(UserError, match="mean 0"):
        Law(mean_s=0)
    with pytest.raises(UserError, match="they do not die"):
        Source(target=Target.LINK, gap=Law(mean_s=1.0))


MIXED = (
    Source(target=Target.DEVICE, gap=Law(mean_s=1800.0), lasts=Law(mean_s=600.0)),
    Source(
        target=Target.NODE,
        gap=Law(mean_s=20_000.0, form=Form.WEIBULL, shape=0.7),
        each=True,
        lasts=Law(mean_s=900.0, form=Form.LOG_NORMAL, shape=0.5),
        severity=Severity.MEDIUM,
    ),
    Source(
        target=Target.NETWORK,
        gap=Law(mean_s=3000.0),
        lasts=Law(mean_s=300.0),
        severity=Severity.SEVERE,
    ),
)


def test_the_same_seed_gives_the_same_bytes() -> None:
    def drawn(seed: int) -> str:
        return repr(sample(CLUSTER, MIXED, until_s=8 * HOUR_S, seed=seed))

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_sources_do_not_disturb_each_other() -> None:
    alone = sample(CLUSTER, MIXED[:1], until_s=8 * HOUR_S, seed=5)
    links = {one for h in sample(CLUSTER, MIXED, until_s=8 * HOUR_S, seed=5) for one in h.links}
    with_links = sample(CLUSTER, (MIXED[0], MIXED[2]), until_s=8 * HOUR_S, seed=5)
    assert [(h.at_s, h.p) for h in with_links if h.p] == [(h.at_s, h.p) for h in alone]
    assert links


def test_one_every_half_hour_kills_another_device_each_time() -> None:
    source = Source(
        target=Target.DEVICE, gap=Law(mean_s=1800.0, form=Form.FIXED), lasts=None, most=5
    )
    found = sample(CLUSTER, [source], until_s=100 * HOUR_S, seed=0)
    assert [one.at_s for one in found] == [1800.0 * n for n in range(1, 6)]
    assert len({rank for one in found for rank, p in one.p if p == 0}) == 5


def test_a_clock_for_each_device_strikes_as_often_as_devices_over_mean() -> None:
    source = Source(target=Target.DEVICE, gap=Law(mean_s=100 * HOUR_S), each=True, lasts=None)
    cluster = uniform_cluster(nodes=32, devices_per_node=8, memory_bytes=2**30)
    counts = [len(sample(cluster, [source], until_s=10 * HOUR_S, seed=s)) for s in range(20)]
    assert np.mean(counts) == pytest.approx(256 * (1 - np.exp(-0.1)), rel=0.1)


def test_severity_says_what_is_left_and_repair_gives_it_back() -> None:
    source = Source(
        target=Target.NODE,
        gap=Law(mean_s=500.0),
        lasts=Law(mean_s=60.0),
        severity=Severity.SEVERE,
    )
    found = sample(CLUSTER, [source], until_s=10 * HOUR_S, seed=1)
    low, high = LEFT[Severity.SEVERE]
    slow = [p for one in found for _, p in one.p if p < 1]
    assert slow
    assert all(low <= p <= high for p in slow)
    for one in found:
        assert len(one.p) % 8 == 0
    assert all(a.at_s < b.at_s for a, b in pairwise(found))


def test_overlapping_faults_of_a_device_end_one_by_one() -> None:
    found = happenings_of(
        [
            Spell(begin_s=10, end_s=40, ranks=(0,), left=0.5),
            Spell(begin_s=20, end_s=50, ranks=(0, 1), left=0.8),
            Spell(begin_s=25, end_s=30, ranks=(0,), left=0.0),
            Spell(begin_s=28, end_s=35, ranks=(0,), left=0.0),
        ]
    )
    assert [(one.at_s, one.p) for one in found] == [
        (10, ((0, 0.5),)),
        (20, ((0, 0.4), (1, 0.8))),
        (25, ((0, 0.0),)),
        (35, ((0, 0.4),)),
        (40, ((0, 0.8),)),
        (50, ((0, 1.0), (1, 1.0))),
    ]


def test_faults_that_meet_change_nothing_where_they_meet() -> None:
    spells = [
        Spell(begin_s=0, end_s=5, links=((0, 1),), left=0.5),
        Spell(begin_s=5, end_s=inf, links=((0, 1),), left=0.5),
    ]
    assert happenings_of(spells) == (Happening(at_s=0, links=(((0, 1), 0.5),)),)
