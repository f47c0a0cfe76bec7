"""When a change of plans is worth it: the rule at its boundaries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from resihp_ext.control.worth import Case, Terms, Verdict, weigh
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit

TERMS = Terms(
    after_steps=3, least_speedup_ratio=1.25, transition_s=10.0, cool_down_steps=8, at_once_ratio=0
)
CASE = Case(
    step=40,
    since_step=31,
    steady_step=33,
    changed_step=10,
    last_step=0,
    observed_s=4.0,
    now_s=2.0,
    then_s=1.5,
    costs_s=(),
)
"""A quarter of a step, one second, was lost in each of ten steps; a change costs ten."""


def verdict(terms: Terms = TERMS, **changes: Any) -> Verdict:
    return weigh(replace(CASE, **changes), terms).verdict


def test_a_change_is_made_when_as_much_was_lost_as_it_costs() -> None:
    found = weigh(CASE, TERMS)
    assert (found.verdict, found.gain, found.lost_s, found.cost_s) == (Verdict.ACT, 0.25, 10, 10)
    assert found.why == "saves 1 s a step (25.0%) and costs 10 s; 10 s were lost since step 31"
    assert verdict(since_step=32) is Verdict.WAIT
    assert verdict(since_step=30) is Verdict.ACT


def test_the_cost_is_what_changes_of_this_job_have_taken() -> None:
    assert weigh(replace(CASE, costs_s=(1.0, 50.0, 3.0)), TERMS).cost_s == 3.0
    assert verdict(costs_s=(10.1,)) is Verdict.WAIT
    assert verdict(replace(TERMS, transition_s=10.1)) is Verdict.WAIT


def test_seconds_are_those_that_pass_and_not_those_of_the_prediction() -> None:
    assert verdict(now_s=200.0, then_s=150.0) is Verdict.ACT
    assert verdict(observed_s=3.9) is Verdict.WAIT


def test_a_prediction_s_error_is_no_reason() -> None:
    assert verdict(then_s=1.6, observed_s=100.0) is Verdict.ACT
    assert verdict(then_s=1.601, observed_s=100.0) is Verdict.NO
    assert verdict(then_s=2.0) is Verdict.NO
    assert verdict(then_s=3.0) is Verdict.NO
    assert verdict(replace(TERMS, least_speedup_ratio=1.0), then_s=2.0) is Verdict.NO


def test_without_figures_nothing_is_done() -> None:
    assert verdict(observed_s=math.nan) is Verdict.WAIT
    assert verdict(now_s=0.0) is Verdict.NO
    assert verdict(then_s=0.0) is Verdict.NO


def test_speeds_must_stay_for_some_steps() -> None:
    assert verdict(steady_step=37) is Verdict.ACT
    assert verdict(steady_step=38) is Verdict.WAIT


def test_changes_have_a_distance() -> None:
    assert verdict(changed_step=32) is Verdict.ACT
    assert verdict(changed_step=33) is Verdict.WAIT


def test_what_does_not_pay_in_the_steps_that_are_left_is_not_done() -> None:
    assert verdict(last_step=50) is Verdict.ACT
    assert verdict(last_step=49) is Verdict.NO
    assert verdict(last_step=39) is Verdict.NO


def test_what_pays_many_times_over_is_done_at_once() -> None:
    at_once = replace(TERMS, at_once_ratio=3.0)
    assert verdict(at_once, since_step=40, last_step=70) is Verdict.ACT
    assert verdict(at_once, since_step=40, last_step=69) is Verdict.WAIT
    assert verdict(at_once, since_step=40, last_step=0) is Verdict.WAIT
    assert verdict(TERMS, since_step=40, last_step=10_000) is Verdict.WAIT
    assert verdict(at_once, since_step=40, last_step=70, steady_step=38) is Verdict.WAIT


def test_whenever_slowness_ends_at_most_twice_the_least_is_spent() -> None:
    """Against somebody who knows when it ends; without a change that is in vain at the end."""
    terms = replace(TERMS, after_steps=0, cool_down_steps=0)
    for slow_steps in range(1, 60):
        spent_s = 0.0
        for step in range(1, slow_steps + 1):
            spent_s += 1.0
            case = replace(CASE, step=step, since_step=1, steady_step=1, changed_step=0)
            if weigh(case, terms).verdict is Verdict.ACT:
                spent_s += 10.0
                break
        assert spent_s <= 2 * min(float(slow_steps), 10.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"after_steps": -1}, "--resilience-act-after-steps -1"),
        ({"cool_down_steps": -1}, "cool-down"),
        ({"least_speedup_ratio": 0.9}, "--resilience-act-least-speedup-ratio is 0.9"),
        ({"transition_s": 0.0}, "--resilience-act-transition-s is 0.0"),
        ({"transition_s": math.nan}, "--resilience-act-transition-s is nan"),
        ({"at_once_ratio": -1.0}, "--resilience-act-at-once-ratio is -1.0"),
    ],
)
def test_terms_are_checked(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        replace(TERMS, **changes)
