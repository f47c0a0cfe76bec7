"""What came of a simulated run: how its time was spent, and every change.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import StrEnum

from resihp_ext.simulator.health import Health
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policy import Cause


class State(StrEnum):
    """What a stretch of time was spent on."""

    TRAIN = "train"
    BROKEN = "broken"
    """Part of an iteration that a death has made worthless."""
    NOTICE = "notice"
    """From a death to its being known."""
    CHANGE = "change"
    """Training stands still for another layout, or a restart."""
    VALIDATE = "validate"
    """Training stands still for benchmarks."""
    WAIT = "wait"
    """No layout holds the model: waiting for devices."""
    SAVE = "save"
    """Training stands still for a checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Some time spent on one thing."""

    begin_s: float
    end_s: float
    state: State
    steps: int = 0
    """Iterations that ended in it."""
    layout: int = -1
    """Number of the layout, in :attr:`Record.layouts`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """A policy was asked, and something came of it."""

    at_s: float
    step: int
    cause: Cause
    health: Health
    """As it was known."""
    before: int
    after: int
    """Numbers of layouts; -1: none."""
    pause_s: float
    moved_bytes: int
    lost_steps: int
    """Iterations to be done again."""
    before_s: float
    after_s: float
    """Seconds of an iteration: of a healthy job before, and as it is from now on."""
    reason: str


@dataclass(kw_only=True)
class Record:
    """Everything, in the order of time."""

    policy: str
    step_tokens: int
    healthy_s: float
    """Of an iteration of the nominal layout on healthy devices, in the mean."""
    stretches: list[Stretch] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    layouts: list[Layout] = field(default_factory=list)
    steps: int = 0
    """Iterations that count in the end."""
    redone: int = 0
    """Iterations done again."""
    alarms: int = 0
    false_alarms: int = 0

    @property
    def seconds(self) -> float:
        """From the beginning to the end."""
        return self.stretches[-1].end_s if self.stretches else 0.0

    @property
    def throughput(self) -> float:
        """Tokens that count, a second."""
        return self.steps * self.step_tokens / self.seconds if self.seconds else 0.0

    @property
    def goodput_ratio(self) -> float:
        """Over a job to which nothing happens."""
        return self.steps * self.healthy_s / self.seconds if self.seconds else 0.0

    @property
    def spent_s(self) -> dict[State, float]:
        """Seconds by what they were spent on."""
        found: dict[State, float] = defaultdict(float)
        for one in self.stretches:
            found[one.state] += one.end_s - one.begin_s
        return dict(found)
