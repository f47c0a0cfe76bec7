"""Whether a better plan is worth the change to it, now: a rule on figures, without any state.

Nobody knows how long a device stays slow. So the job waits until what it has lost for want of the
change is what the change costs (ski rental, Karlin et al. 1988): whatever happens next, it has then
spent at most twice what somebody would have who knew the future. Where the steps that are left make
a change pay many times over, it does not wait.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

from resihp_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """Plans for slow devices."""

    after_steps: int = 3
    """Steps for which the speeds of all devices must have been the same, before a plan for them is
    run."""

    least_speedup_ratio: float = 1.05
    """Another plan must be this many times as fast: less is within a prediction's error."""

    transition_s: float = 5.0
    """What a change of plans is taken to cost in seconds, until this job has made one."""

    cool_down_steps: int = 10
    """Steps after any change of plans in which speeds change none."""

    at_once_ratio: float = 20.0
    """A change that saves this many times its cost in the steps that are left is made at once,
    without waiting until as much was lost as it costs; 0: never."""

    def __post_init__(self) -> None:
        if min(self.after_steps, self.cool_down_steps) < 0:
            raise UserError(
                f"--resilience-act-after-steps {self.after_steps} and --resilience-act-cool-down-"
                f"steps {self.cool_down_steps}: give 0 or a number of steps"
            )
        if not 1 <= self.least_speedup_ratio < math.inf:
            raise UserError(
                f"--resilience-act-least-speedup-ratio is {self.least_speedup_ratio}; give 1 or "
                "more"
            )
        if not 0 < self.transition_s < math.inf:
            raise UserError(
                f"--resilience-act-transition-s is {self.transition_s}; give seconds above 0"
            )
        if not 0 <= self.at_once_ratio < math.inf:
            raise UserError(
                f"--resilience-act-at-once-ratio is {self.at_once_ratio}; give 0 or a multiple"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """What is known after a step."""

    step: int
    """The latest one that is done."""
    since_step: int
    """The first one that the better plan would have made faster."""
    steady_step: int
    """At which the speeds of devices were last found to be others."""
    changed_step: int
    """After which the job last changed its plan, or began."""
    last_step: int
    """With which the job ends; 0: not known."""
    observed_s: float
    """What a step takes now."""
    now_s: float
    """What the present plan should take for a step, by prediction."""
    then_s: float
    """What the better one should take."""
    costs_s: Sequence[float]
    """What earlier changes of this job have taken, the latest last."""


class Verdict(StrEnum):
    """What to do about a better plan."""

    ACT = "act"
    WAIT = "wait"
    """It may become worth it."""
    NO = "no"
    """Not with these speeds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """The answer of the rule."""

    verdict: Verdict
    why: str
    """For people."""
    gain: float
    """Part of a step's time that the better plan saves."""
    lost_s: float
    """That would have been saved since the first slower step."""
    cost_s: float
    """Of the change."""


def weigh(case: Case, terms: Terms) -> Weighed:
    """Decides after a step."""
    known = case.now_s > 0 and case.then_s > 0
    gain = 1 - case.then_s / case.now_s if known else 0.0
    cost_s = median(case.costs_s) if case.costs_s else terms.transition_s
    gain_s = gain * case.observed_s
    lost_s = max(0.0, gain_s * (case.step - case.since_step + 1))
    verdict, why = _verdict(case, terms, gain, gain_s, lost_s, cost_s)
    return Weighed(verdict=verdict, why=why, gain=gain, lost_s=lost_s, cost_s=cost_s)


def _verdict(
    case: Case, terms: Terms, gain: float, gain_s: float, lost_s: float, cost_s: float
) -> tuple[Verdict, str]:
    if not case.observed_s > 0 or math.isinf(case.observed_s):
        return Verdict.WAIT, "no step was measured yet"
    if gain <= 0 or 1 / (1 - gain) < terms.least_speedup_ratio:
        wanted = f"{terms.least_speedup_ratio:g} times as fast is wanted"
        return Verdict.NO, f"another plan saves {max(0.0, gain):.1%} of a step; {wanted}"
    saves = f"saves {gain_s:.3g} s a step ({gain:.1%}) and costs {cost_s:.3g} s"
    left = case.last_step - case.step
    if case.last_step and left * gain_s < cost_s:
        return Verdict.NO, f"another plan {saves}, {max(0, left)} steps are left"
    young = case.steady_step + terms.after_steps - case.step
    if young > 0:
        return Verdict.WAIT, f"another plan {saves}; the speeds are watched for {young} more steps"
    cooling = case.changed_step + terms.cool_down_steps - case.step
    if cooling > 0:
        return Verdict.WAIT, f"another plan {saves}; not before {cooling} more steps have run"
    if lost_s >= cost_s:
        return Verdict.ACT, f"{saves}; {lost_s:.3g} s were lost since step {case.since_step}"
    if case.last_step and terms.at_once_ratio and left * gain_s >= terms.at_once_ratio * cost_s:
        return Verdict.ACT, f"{saves}, with {left} steps left"
    return Verdict.WAIT, f"another plan {saves}; {lost_s:.3g} s were lost yet"
