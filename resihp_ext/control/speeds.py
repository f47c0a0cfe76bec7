"""What is known of the speeds of a job's devices, and of the plan that they call for.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from resihp_ext.control.worth import Terms, Verdict

COSTS = 5
"""Changes of plans whose cost is remembered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Better:
    """A plan for the present speeds."""

    plan: str
    """JSON."""
    version: int
    now_s: float
    """What a step of the present plan should take."""
    then_s: float
    """What one of this plan should take."""


@dataclass(slots=True, kw_only=True)
class Speeds:
    """Of all devices that are slow, and what is under way because of them."""

    terms: Terms | None = None
    """None: nothing is done about slow devices."""
    last_step: int = 0
    """With which the job ends; 0: not known."""
    p: Mapping[int, float] = field(default_factory=dict)
    """Throughput of the devices that are known to be slow, by rank."""
    planned: Mapping[int, float] = field(default_factory=dict)
    """The same, as the plan that runs takes them."""
    step: int = 0
    """The latest that was judged."""
    observed_s: float = math.nan
    """What a step takes, as far as it was judged under the plan that runs."""
    since_step: int = 0
    """The first step that another plan would have made faster."""
    steady_step: int = 0
    """At which :attr:`p` was last another one."""
    changed_step: int = 0
    """After which the plan was last another one."""
    questions: int = 0
    asked: str = ""
    """The question to the planner that is open, or was answered."""
    usable: tuple[int, ...] = ()
    """Ranks that it was asked about."""
    better: Better | None = None
    costs_s: deque[float] = field(default_factory=lambda: deque(maxlen=COSTS))
    """What changes of the plan have taken, the latest last."""
    taking_s: float = 0.0
    """The same of the one that is under way, by the slowest rank that has told of it."""
    said: Verdict | None = None
    """What was last decided and told."""
    said_step: int = 0

    def described(self, problem: str) -> None:
        """What the job has said of itself."""
        try:
            found = json.loads(problem)
            self.terms = Terms(**found["act"]) if found.get("act") else None
            self.last_step = int(found.get("last_step", 0))
        except (ValueError, TypeError, AttributeError):
            self.terms = None

    @property
    def open(self) -> bool:
        """Whether the plan that runs was made for other speeds."""
        return self.terms is not None and self.p != self.planned

    def used(self) -> Mapping[int, float]:
        """Speeds that plans are made for."""
        return self.p if self.terms is not None else {}

    def found(self, p: Mapping[int, float], since_step: int) -> bool:
        """Takes what is known now.

        Args:
            since_step: The first step with these speeds.

        Returns:
            Whether that is news.
        """
        if p == self.p:
            return False
        self.since_step = self.since_step if self.open else since_step
        self.p, self.steady_step = dict(p), self.step
        self.forget_plan()
        return True

    def forget_plan(self) -> None:
        """What was asked is out of date."""
        self.asked, self.better, self.said = "", None, None

    def ran(self, slow: Mapping[int, float]) -> None:
        """All members run a plan, made for slow devices of these speeds: everything begins anew."""
        self.changed_step, self.observed_s = self.step, math.nan
        if self.taking_s > 0:
            self.costs_s.append(self.taking_s)
        self.taking_s = 0.0
        self.planned = slow
        self.since_step = self.step + 1
        self.forget_plan()
