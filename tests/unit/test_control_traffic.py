"""Every message has a way, a direction and a limit; trouble is counted, and seldom said."""

from __future__ import annotations

import logging

import pytest
from control_samples import KINDS, SAMPLES

from resihp_ext.control import messages as say
from resihp_ext.control.counters import Counters
from resihp_ext.control.traffic import LARGE_BYTES, SMALL_BYTES, TO_CLIENT, TO_SERVER, packed
from resihp_ext.errors import ResiHPError

pytestmark = pytest.mark.unit


def test_samples_are_complete_and_survive() -> None:
    assert {type(sample) for sample in SAMPLES} == set(KINDS)
    for sample in SAMPLES:
        assert say.decode(packed(sample)) == sample


def test_every_message_has_one_direction() -> None:
    up = {kind for kinds in TO_SERVER.values() for kind in kinds}
    down = {kind for kinds in TO_CLIENT.values() for kind in kinds}
    assert up | down == set(KINDS)
    assert not up & down


def test_plans_may_be_large_and_signs_of_life_may_not() -> None:
    plan = "x" * (LARGE_BYTES - 1000)
    assert packed(say.Go(epoch=1, plan=plan, region=0, result=(), version=1, reason=""))
    with pytest.raises(ResiHPError, match="Go has 167"):
        packed(say.Go(epoch=1, plan=plan + plan[:1000], region=0, result=(), version=1, reason=""))
    many = tuple(range(SMALL_BYTES // 2))
    with pytest.raises(ResiHPError, match=f"at most {SMALL_BYTES}"):
        packed(say.NodeBeat(node="a", step=0, alive=many))


def test_largest_plan_fits_into_its_envelope() -> None:
    plan = "x" * (LARGE_BYTES - 1000)
    inner = packed(say.Go(epoch=1, plan=plan, region=0, result=(), version=1, reason=""))
    assert packed(say.ForRanks(ranks=tuple(range(128)), message=inner))


def test_flood_is_counted_and_said_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    counters = Counters(logging.getLogger("flood"), every_s=10.0, clock=lambda: now_s)
    with caplog.at_level(logging.WARNING, "flood"):
        for _ in range(1000):
            counters.count("bad tag", "one\nforged line")
        counters.count("oversize", "two")
        now_s = 10.0
        counters.count("bad tag", "x" * 10_000)
    assert counters.as_dict() == {"bad tag": 1001, "oversize": 1}
    first, second, third = (record.getMessage() for record in caplog.records)
    assert "\n" not in first
    assert "oversize" in second
    assert "1001 so far" in third
    assert len(third) < 300
