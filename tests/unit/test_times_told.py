"""What ranks tell of their steps, and what the coordinator keeps of it."""

from __future__ import annotations

import logging

import msgspec
import pytest
from control_samples import TIMES
from coordinated import running
from measured_steps import measured

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Say
from resihp_ext.control.counters import Counters
from resihp_ext.control.membership import Phase
from resihp_ext.control.pace_messages import MOST_ACTIONS
from resihp_ext.control.slowness import Slowness
from resihp_ext.control.traffic import LARGE_BYTES, packed
from resihp_ext.control.uplink import Uplink
from resihp_ext.plan.plan import uniform_plan

pytestmark = pytest.mark.unit


def told(rank: int, step: int) -> say.Timed:
    return say.Timed(rank=rank, times=msgspec.structs.replace(TIMES, rank=rank, step=step))


def test_the_coordinator_says_who_is_slow() -> None:
    plan = uniform_plan(num_layers=4, tp=1, pp=2, dp=2, micro_batches=4)
    slowness, nodes = Slowness(), lambda: dict.fromkeys(range(4), "n0")
    lines = [
        line
        for step in range(1, 40)
        for rank in range(4)
        for line in slowness.heard(
            measured(plan, rank, step, slow=2.0 if rank == 2 and step >= 30 else 1.0),
            plan.to_json(),
            nodes,
        )
    ]
    assert len(lines) == 1, lines
    assert "rank 2 (node n0) works at 0.5" in lines[0]
    assert slowness.report is not None
    assert slowness.report.step == 39


def test_a_detector_that_fails_ends_nothing() -> None:
    slowness = Slowness()
    (line,) = slowness.heard(TIMES, "no plan", dict)
    assert line.startswith("resihp: slow devices are not looked for any more")
    assert slowness.heard(TIMES, "no plan", dict) == []
    job = running()
    for rank, step in ((0, 1), (1, 1), (0, 2)):
        assert all(isinstance(one, Say) for one in job.hear(told(rank, step)))
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
