"""Where the time of a step goes, by a clock that moves when it is told to."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from megatron.resilience.timing.clock import OFF, StepClock
from megatron.resilience.timing.config import TimingConfig
from megatron.resilience.timing.report import report_times
from resihp_ext.detector.timed import MicroBatch, RankStep
from resihp_ext.errors import UserError
from resihp_ext.events import EventLog, read_events
from resihp_ext.plan.action import Kind

pytestmark = pytest.mark.unit

EPOCH_S = 1_000_000.0


class Hand:
    """A clock that somebody moves."""

    def __init__(self) -> None:
        self.now_s = 10.0
        self.steps: list[RankStep] = []
        self.clock = StepClock(3, now_s=lambda: self.now_s, wall_s=lambda: EPOCH_S + self.now_s)
        self.clock.on_step.append(self.steps.append)

    def go(self, seconds: float) -> None:
        self.now_s += seconds

    def wait(self, seconds: float) -> None:
        with self.clock.waiting():
            self.go(seconds)

    def act(self, kind: Kind, micro_batch: int, own_s: float, wait_s: float = 0.0) -> None:
        self.clock.begin(kind, micro_batch)
        self.go(own_s)
        if wait_s:
            self.wait(wait_s)

    def step(self, number: int, *, before_s: float = 0.0) -> None:
        """2 s of actions and 1 s between SYNC and STEP."""
        self.go(before_s)
        self.clock.restart(number, 7)
        self.act(Kind.FORWARD, 0, 0.5)
        self.act(Kind.SYNC, -1, 0.25, 0.25)
        self.clock.end()
        self.go(1.0)
        self.act(Kind.STEP, -1, 1.0)
        self.clock.finish()


@pytest.fixture
def hand() -> Hand:
    return Hand()


def split(step: RankStep) -> list[tuple[str, int, float, float]]:
    return [(str(a.kind), a.micro_batch, a.own_s, a.wait_s) for a in step.actions]


def test_own_work_and_waits_of_every_action(hand: Hand) -> None:
    hand.clock.restart(1, 7)
    hand.act(Kind.RECV_FORWARD, 4, 2.0)
    hand.act(Kind.FORWARD, 4, 3.0, 1.0)
    hand.go(0.5)
    hand.wait(0.5)
    hand.act(Kind.SEND_FORWARD, 4, 0.25)
    hand.act(Kind.SYNC, -1, 0.0, 2.0)
    hand.clock.end()
    hand.go(4.0)
    hand.act(Kind.STEP, -1, 1.0)
    hand.clock.finish()
    (step,) = hand.steps
    assert split(step) == [
        ("RF", 4, 0.0, 2.0),
        ("F", 4, 3.5, 1.5),
        ("SF", 4, 0.25, 0.0),
        ("SYNC", -1, 0.0, 2.0),
        ("STEP", -1, 1.0, 0.0),
    ]
    assert [action.start_s for action in step.actions] == [0.0, 2.0, 7.0, 7.25, 13.25]
    assert (step.rank, step.step, step.version) == (3, 1, 7)
    assert (step.begun_s, step.total_s) == (EPOCH_S + 10.0, 14.25)


def test_a_step_begins_where_the_one_before_ended(hand: Hand) -> None:
    hand.step(1)
    hand.step(2, before_s=0.5)
    first, second = hand.steps
    assert second.total_s == first.total_s + 0.5
    assert second.begun_s == first.begun_s + first.total_s
    assert second.actions[0].start_s == 0.5
    assert second.actions[-1].end_s == second.total_s


def test_evaluations_and_checkpoints_belong_to_no_step(hand: Hand) -> None:
    hand.step(1)
    with suppress(ZeroDivisionError), hand.clock.apart():
        hand.go(100.0)
        raise ZeroDivisionError
    hand.step(2, before_s=0.5)
    hand.step(3, before_s=0.5)
    _, second, third = hand.steps
    assert second.total_s == third.total_s == 3.5
    assert second.begun_s == EPOCH_S + 10.0 + 3.0 + 100.0, "by the host's clock, ranks compare it"
    assert second.actions[0].start_s == 0.5


def test_of_several_attempts_the_last_one_counts(hand: Hand) -> None:
    hand.step(1)
    hand.clock.restart(2, 7)
    hand.act(Kind.FORWARD, 0, 1.0)
    hand.clock.begin(Kind.FORWARD, 1)
    with suppress(ConnectionError), hand.clock.waiting():
        hand.go(8.0)
        raise ConnectionError
    hand.step(2)
    assert split(hand.steps[1]) == split(hand.steps[0])
    assert hand.steps[1].total_s == 12.0


def test_a_step_that_others_have_finished_is_not_told(hand: Hand) -> None:
    hand.step(1)
    hand.clock.restart(2, 7)
    hand.act(Kind.FORWARD, 0, 1.0)
    hand.clock.drop()
    assert not hand.clock.computing
    hand.act(Kind.STEP, -1, 5.0)
    hand.clock.finish()
    hand.step(3)
    assert [step.step for step in hand.steps] == [1, 3]
    assert hand.steps[1] == msgspec.structs.replace(
        hand.steps[0], step=3, begun_s=EPOCH_S + 10.0 + 3.0 + 6.0
    )


def test_a_vote_that_is_repeated_replaces_the_one_before(hand: Hand) -> None:
    hand.clock.restart(1, 7)
    hand.act(Kind.STEP, -1, 5.0, 5.0)
    hand.act(Kind.STEP, -1, 1.0)
    hand.clock.finish()
    assert split(hand.steps[0]) == [("STEP", -1, 1.0, 0.0)]


def test_a_wait_inside_a_wait_counts_once(hand: Hand) -> None:
    hand.clock.restart(1, 7)
    hand.clock.begin(Kind.BACKWARD, 0)
    assert hand.clock.computing
    with hand.clock.waiting():
        assert not hand.clock.computing, "the patch asks this"
        hand.clock.wait_begins()
        hand.go(1.0)
    hand.go(0.5)
    hand.clock.finish()
    assert split(hand.steps[0]) == [("B", 0, 0.5, 1.0)]


def test_lengths_of_the_micro_batches_that_were_read(hand: Hand) -> None:
    clock = hand.clock
    clock.restart(1, 7)
    clock.begin(Kind.FORWARD, 5)
    clock.note(2, 8, torch.tensor([0, 3, 8, 9, 16]))
    clock.begin(Kind.FORWARD, 2)
    clock.note(2, 8, None)
    clock.begin(Kind.FORWARD, 5, 1)
    clock.note(2, 8, torch.tensor([0, 3, 8, 9, 16]))
    clock.begin(Kind.BACKWARD, 9)
    clock.note(2, 8, None)
    clock.finish()
    expected = (MicroBatch(2, 16, 2 * 64), MicroBatch(5, 16, 9 + 25 + 1 + 49))
    assert hand.steps[0].micro_batches == expected


def test_nothing_is_measured_for_nobody(hand: Hand) -> None:
    hand.clock.on_step.clear()
    hand.step(1)
    assert hand.steps == []
    OFF.restart(1, 1)
    OFF.begin(Kind.FORWARD, 0)
    assert not OFF.computing


class Events:
    """Marks of a device that is behind: each can be read once the device has come to it."""

    lag = 1

    def __init__(self, hand: Hand) -> None:
        self._hand = hand
        self.reached = 0
        self.made: list[list[float]] = []
        self.free: list[list[float]] = []

    def mark(self) -> Any:
        mark = self.free.pop() if self.free else []
        if not any(mark is one for one in self.made):
            self.made.append(mark)
        mark[:] = [self._hand.now_s]
        return mark

    def is_past(self, mark: list[float]) -> bool:
        return mark[0] <= self.reached

    def between_s(self, first: list[float], second: list[float]) -> float:
        assert self.is_past(second), "nobody may wait for the device"
        return second[0] - first[0]

    def give_back(self, marks: Iterable[Any]) -> None:
        for mark in marks:
            assert not any(mark is one for one in self.free), "given back twice"
            self.free.append(mark)


def test_a_device_is_read_later_and_its_marks_are_used_again() -> None:
    hand = Hand()
    events = Events(hand)
    now = lambda: hand.now_s  # noqa: E731 - the same clock as its own
    hand.clock = StepClock(3, events, now_s=now, wall_s=now)
    hand.clock.on_step.append(hand.steps.append)
    hand.step(1)
    assert hand.steps == [], "a step late"
    hand.step(2)
    assert hand.steps == [], "the device is not that far"
    events.reached = 10**6
    hand.step(3)
    assert [step.step for step in hand.steps] == [1, 2]
    made = len(events.made)
    for number in range(4, 10):
        hand.step(number)
        hand.clock.restart(0, 0)
        hand.act(Kind.FORWARD, 1, 1.0, 1.0)
    assert len(events.made) <= made + 8
    assert [step.step for step in hand.steps] == list(range(1, 9))
    assert split(hand.steps[0]) == split(hand.steps[-1])


def test_times_of_every_second_step_are_events(hand: Hand, tmp_path: Path) -> None:
    events = EventLog(tmp_path, rank=3)
    executor = SimpleNamespace(clock=hand.clock)
    report_times(executor, events, TimingConfig(timings_steps=2))
    for number in range(1, 5):
        hand.step(number)
    events.close()
    found = read_events(events.path)
    assert [event["step"] for event in found] == [2, 4]
    assert {event["event"] for event in found} == {"step_times"}
    assert msgspec.convert(found[1]["times"], RankStep) == hand.steps[3]


def test_no_events_unless_wanted(hand: Hand, tmp_path: Path) -> None:
    events = EventLog(tmp_path, rank=3)
    report_times(SimpleNamespace(clock=hand.clock), events, TimingConfig())
    report_times(SimpleNamespace(clock=hand.clock), None, TimingConfig(timings_steps=1))
    report_times(None, events, TimingConfig(timings_steps=1))
    assert len(hand.clock.on_step) == 1
    events.close()
    with pytest.raises(UserError, match="--resilience-timings-steps is -1"):
        TimingConfig(timings_steps=-1)


def test_an_action_costs_microseconds() -> None:
    clock = StepClock(0)
    clock.on_step.append(lambda _step: None)
    times = []
    for number in range(5):
        began_s = time.perf_counter()
        clock.restart(number, 0)
        for micro_batch in range(500):
            clock.begin(Kind.FORWARD, micro_batch)
            clock.wait_begins()
            clock.wait_ends()
        clock.finish()
        times.append((time.perf_counter() - began_s) / 500)
    assert min(times) < 100e-6, "of an action of tens of milliseconds"
