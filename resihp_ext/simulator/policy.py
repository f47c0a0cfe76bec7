"""A policy: what a system does when devices die, become slow, or come back.

Every system that is compared is one class in :mod:`resihp_ext.simulator.policies`. The engine tells
it what it can know, and never the truth behind it.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum

from resihp_ext.simulator.health import Health
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.setting import Setting


class Cause(StrEnum):
    """Why a policy is asked."""

    DEAD = "dead"
    """Devices have died; training stands still."""
    SLOW = "slow"
    """Devices or links are known to be slower, or less slow, than before."""
    BACK = "back"
    """Dead devices can take part again, or slow ones are as fast as ever."""
    WAITED = "waited"
    """Nothing is new, but more time has been lost since (:attr:`View.lost_s`); asked after every
    ``patience_s`` that are lost while devices are known to be slow."""


class Sense(StrEnum):
    """How a policy gets to know of slow devices."""

    BLIND = "blind"
    """It does not."""
    RAW = "raw"
    """Greyhound: change points of iteration times, then a validation that stops everybody."""
    WORKLOAD = "workload"
    """Ours: own work of each device over its prediction, then a validation of suspects."""


class Undone(StrEnum):
    """What a change costs of work that was done."""

    NOTHING = "nothing"
    STEP = "step"
    """The interrupted iteration."""
    CHECKPOINT = "checkpoint"
    """Everything since the last checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a policy knows when it is asked."""

    setting: Setting
    cause: Cause
    layout: Layout | None
    """What runs, or ran until now; None while nothing can."""
    health: Health
    """As it is known."""
    now_s: float
    lost_s: float = 0.0
    """Time lost to slow devices since they became known, over the pace of a healthy job."""
    held: Layout | None = None
    """The last layout that ran: its ranks hold its state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What to do."""

    layout: Layout | None
    """What to run; the same object as in the view: nothing changes. None: training stops until
    devices come back."""
    pause_s: float = 0.0
    """How long training stands still for the change."""
    undone: Undone = Undone.NOTHING
    saved: bool = False
    """Whether a checkpoint has been saved within the pause."""
    moved_bytes: int = 0
    reason: str = ""
    """One sentence."""


class Policy(ABC):
    """One system. Objects carry what it remembers within one simulated run."""

    name: str
    """As tables and flags call it."""
    sense: Sense = Sense.BLIND
    patience_s: float = 60.0
    """See :attr:`Cause.WAITED`."""

    @abstractmethod
    def begin(self, setting: Setting) -> Layout:
        """The layout before anything happens."""

    @abstractmethod
    def answer(self, view: View) -> Answer:
        """What to do now."""
