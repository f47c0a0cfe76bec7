"""What ranks tell of their steps, and what the coordinator keeps of it."""

from __future__ import annotations

import logging

import msgspec
import pytest
from control_samples import TIMES
from coordinated import running

from resihp_ext.control import messages as say
from resihp_ext.control.counters import Counters
from resihp_ext.control.membership import Phase
from resihp_ext.control.messages import MOST_ACTIONS
from resihp_ext.control.traffic import LARGE_BYTES, packed
from resihp_ext.control.uplink import Uplink

pytestmark = pytest.mark.unit


def told(rank: int, step: int) -> say.Timed:
    return say.Timed(rank=rank, times=msgspec.structs.replace(TIMES, rank=rank, step=step))


def test_the_coordinator_keeps_the_latest_of_each_rank() -> None:
    job = running()
    kept = job.rules.job.times
    for rank, step in ((0, 1), (1, 1), (0, 2)):
        assert job.hear(told(rank, step)) == []
    assert {rank: times.step for rank, times in kept.items()} == {0: 2, 1: 1}
    job.hear(told(0, 9), node="n1")
    assert kept[0].step == 2, "of another node than the rank's"
    assert job.phase is Phase.RUNNING


def test_a_rank_speaks_for_itself_alone() -> None:
    raw = packed(told(3, 1))
    assert say.decode(raw) == told(3, 1)
    forged = raw.replace(packed(say.Armed(rank=3))[-5:], packed(say.Armed(rank=4))[-5:])
    assert forged != raw
    with pytest.raises(msgspec.ValidationError, match="times of rank 3"):
        say.decode(forged)


def test_no_more_actions_than_fit_into_a_message() -> None:
    most = msgspec.structs.replace(
        TIMES, actions=TIMES.actions * MOST_ACTIONS, micro_batches=TIMES.micro_batches * 1000
    )
    assert len(packed(say.Timed(rank=1, times=most))) < LARGE_BYTES / 2
    more = msgspec.structs.replace(TIMES, actions=TIMES.actions * (MOST_ACTIONS + 1))
    with pytest.raises(ValueError, match="65537 actions"):
        say.Timed(rank=1, times=more)


def test_news_are_not_kept_for_a_coordinator_that_is_not_there() -> None:
    uplink = Uplink(
        b"", Counters(logging.getLogger(__name__)), lease_s=1.0, on_message=print, on_cut_off=print
    )
    uplink.post(packed(say.Ready(rank=1)))
    uplink.offer(packed(told(1, 1)))
    assert list(uplink._kept) == [packed(say.Ready(rank=1))]
