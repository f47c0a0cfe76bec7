"""Greyhound as a policy: what each level does, and when it is due."""

from itertools import combinations_with_replacement

import pytest
from straggler_views import Told, job, ranks_of, shares_of

from resihp_ext.simulator.health import Health
from resihp_ext.simulator.policies.greyhound import Greyhound
from resihp_ext.simulator.policies.restarting import planned_restart_s
from resihp_ext.simulator.policy import Cause, Undone
from resihp_ext.simulator.pricing import Pricing

pytestmark = pytest.mark.unit


def test_a_slow_device_costs_its_replica_micro_batches_at_once() -> None:
    told = Told(Greyhound(), job())
    answer = told.of(Cause.SLOW, {0: 0.5})
    first, second = shares_of(told.plan)
    assert first < second
    assert answer.pause_s == 0
    assert answer.undone is Undone.NOTHING
    assert answer.reason.startswith("S2")
    told.of(Cause.BACK)
    assert told.plan == told.setting.nominal


def test_shares_are_the_best_of_all() -> None:
    setting = job(dp=3, micro_batches=18)
    told = Told(Greyhound(), setting)
    p = {0: 0.45, 4: 0.8}
    told.of(Cause.SLOW, p)
    pricing = Pricing(setting, Health.of(p))
    replicas = setting.nominal.replicas

    def seconds(shares: tuple[int, ...]) -> float:
        return max(pricing.chain_s(one, m) for one, m in zip(replicas, shares, strict=True))

    cuts = combinations_with_replacement(range(1, 18), 2)
    every = [(a, b - a, 18 - b) for a, b in cuts if b > a]
    assert seconds(tuple(shares_of(told.plan))) == min(map(seconds, every))


def test_a_very_slow_replica_keeps_a_micro_batch() -> None:
    told = Told(Greyhound(), job())
    told.of(Cause.SLOW, {0: 0.01})
    assert shares_of(told.plan) == [1, 31]


def test_a_slow_link_between_owners_of_a_layer_gets_out_of_their_way() -> None:
    setting = job(dp=4, micro_batches=64)
    links = {(0, 1): 0.1}
    told = Told(Greyhound(), setting)
    begun = told.layout
    # Nodes 0 and 1 hold the first stage of all replicas. The loss has not reached the cost yet.
    pricing = Pricing(setting, Health.of({}, links))
    unseen_s = 10 * (
        pricing.iteration_s(setting.nominal)
        - Pricing(setting, Health()).iteration_s(setting.nominal)
    )
    answer = told.of(Cause.SLOW, links=links)
    if unseen_s < 2.0:
        assert answer.layout is begun
        answer = told.of(Cause.WAITED, links=links, lost_s=10.0)
    assert answer.reason.startswith("S3")
    assert answer.moved_bytes > 0
    assert answer.pause_s > 0
    healthy_s = Pricing(setting, Health()).iteration_s(setting.nominal)
    assert pricing.iteration_s(told.plan) < 1.02 * healthy_s
    assert shares_of(told.plan) == [16] * 4


def test_slow_groups_of_several_replicas_come_together() -> None:
    told = Told(Greyhound(), job(micro_batches=64))
    p = {0: 0.6, 12: 0.6}
    told.of(Cause.SLOW, p)
    told.of(Cause.WAITED, p, lost_s=30.0)
    homes = [number for number, one in enumerate(told.plan.replicas) if set(p) & set(one.ranks)]
    assert len(homes) == 1


def test_the_restart_waits_until_its_cost_is_lost() -> None:
    setting = job(dp=4, micro_batches=64, spares=8)
    told = Told(Greyhound(), setting)
    p = {0: 0.1}
    told.of(Cause.SLOW, p)
    shared = told.layout
    cost_s = planned_restart_s(setting)
    early = told.of(Cause.WAITED, p, lost_s=cost_s / 2)
    assert early.layout is shared
    late = told.of(Cause.WAITED, p, lost_s=cost_s)
    assert late.reason.startswith("S4")
    assert late.pause_s == cost_s
    assert late.undone is Undone.NOTHING
    # The spare node takes the place: no replica is lost.
    assert 0 not in ranks_of(told.plan)
    assert len(told.plan.replicas) == 4
    assert shares_of(told.plan) == [16] * 4


def test_deaths_leave_whole_replicas_made_of_what_is_left() -> None:
    told = Told(Greyhound(), job(dp=4, micro_batches=64))
    # Replicas 0 and 3 lose a group each: together they still have one of everything.
    answer = told.of(Cause.DEAD, {0: 0.0, 31: 0.0})
    assert answer.undone is Undone.CHECKPOINT
    assert len(told.plan.replicas) == 3
    assert sum(shares_of(told.plan)) == 64
    told.of(Cause.BACK)
    assert told.plan == told.setting.nominal


def test_without_a_whole_replica_it_waits_for_repair() -> None:
    told = Told(Greyhound(), job(dp=1))
    dead = told.of(Cause.DEAD, {0: 0.0})
    assert dead.layout is None
    assert dead.undone is Undone.CHECKPOINT
    back = told.of(Cause.BACK)
    assert told.plan == told.setting.nominal
    assert back.pause_s > 0


def test_the_same_is_answered_twice() -> None:
    def said() -> list[str]:
        told = Told(Greyhound(), job(dp=4, micro_batches=64))
        p = {0: 0.5, 21: 0.4, 44: 0.8}
        for lost_s in (0.0, 50.0, 500.0):
            told.of(Cause.WAITED, p, {(2, 3): 0.2}, lost_s)
        return [told.plan.to_json()]

    assert said() == said()
