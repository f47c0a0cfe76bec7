"""Writes the times of chosen steps into the event log."""

from __future__ import annotations

from typing import Protocol

import msgspec

from megatron.resilience.timing.clock import StepClock
from megatron.resilience.timing.config import TimingConfig
from resihp_ext.detector.timed import RankStep
from resihp_ext.events import Event, EventLog


class Timed(Protocol):
    """Whatever runs steps by a clock."""

    @property
    def clock(self) -> StepClock: ...


def report_times(timed: Timed | None, events: EventLog | None, config: TimingConfig) -> None:
    """Lets a clock write every so many of its steps, if that is wanted."""
    if timed is None or events is None or not config.timings_steps:
        return

    def write(times: RankStep) -> None:
        if times.step % config.timings_steps == 0:
            events.write(Event.STEP_TIMES, step=times.step, times=msgspec.to_builtins(times))

    timed.clock.on_step.append(write)
