"""All baselines through random healths: valid plans without dead ranks, and the way back."""

from random import Random

import pytest
from straggler_views import Told, job, shares_of

from resihp_ext.simulator.engine import simulate
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.laws import Law, Severity, Source, Target, sample
from resihp_ext.simulator.policies.adaptra import Adaptra
from resihp_ext.simulator.policies.greyhound import Greyhound
from resihp_ext.simulator.policies.malleus import Malleus
from resihp_ext.simulator.policy import Cause, Policy
from resihp_ext.simulator.pricing import Pricing

pytestmark = pytest.mark.unit

POLICIES = [Greyhound, Adaptra, Malleus]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_a_random_walk_ends_where_it_began(policy: type[Policy], seed: int) -> None:
    random = Random(seed)
    setting = job(dp=3, micro_batches=24, spares=8 * (seed % 2))
    told = Told(policy(), setting)
    p: dict[int, float] = {}
    links: dict[tuple[int, int], float] = {}
    for _ in range(12):
        rank, link = random.randrange(48), random.choice([(0, 1), (1, 2), (2, 5)])
        before = Health.of(p, links)
        p[rank] = random.choice([0.0, 0.2, 0.5, 0.8, 1.0, 1.0])
        links[link] = random.choice([0.1, 0.5, 1.0])
        dead = Health.of(p, links).dead
        cause = Cause.SLOW
        if dead - before.dead:
            cause = Cause.DEAD
        elif before.dead - dead:
            cause = Cause.BACK
        # The plan of every answer is checked there.
        told.of(cause, p, links, lost_s=random.choice([0.0, 20.0, 500.0]))
        told.of(Cause.WAITED, p, links, lost_s=600.0)
    told.of(Cause.BACK)
    told.of(Cause.WAITED)
    healthy = Pricing(setting, Health())
    assert shares_of(told.plan) == [8, 8, 8]
    # Greyhound leaves nodes where they are: another place is as good.
    assert healthy.iteration_s(told.plan) == pytest.approx(
        healthy.iteration_s(setting.nominal), rel=2e-3
    )
    if policy is not Greyhound:
        assert told.plan == setting.nominal


@pytest.mark.parametrize("policy", POLICIES)
def test_hours_of_mixed_faults_give_the_same_record_twice(policy: type[Policy]) -> None:
    setting = job()
    sources = [
        Source(target=Target.DEVICE, gap=Law(mean_s=2400.0), lasts=Law(mean_s=900.0)),
        Source(
            target=Target.DEVICE,
            gap=Law(mean_s=900.0),
            lasts=Law(mean_s=900.0),
            severity=Severity.MEDIUM,
        ),
    ]
    happenings = sample(setting.cluster, sources, until_s=5400.0, seed=2)
    first, second = (simulate(setting, policy(), happenings, until_s=5400.0) for _ in range(2))
    assert first.steps > 0
    assert repr(first.changes) == repr(second.changes)
    assert first.steps == second.steps
    assert first.changes
