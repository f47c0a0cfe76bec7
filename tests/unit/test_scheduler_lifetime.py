"""What a change must be worth: its transition, its expected lifetime, its least gain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import layout, problem_of

from resihp_ext.scheduler.decide import PLANNERS, decide
from resihp_ext.scheduler.decision import Judge, effective_s
from resihp_ext.scheduler.options import Options
from resihp_ext.scheduler.predict import Predictor

pytestmark = pytest.mark.unit

TOO_SHORT = Options(expected_lifetime_s=1e-3)
"""Less than any transition takes."""


def test_a_gain_may_be_too_small_to_move() -> None:
    problem = problem_of(layout(2, 2, 2), {1: 0.97})
    assert decide(problem).name != "stay"
    decision = decide(replace(problem, options=Options(least_gain=0.9)))
    assert decision.plan is problem.current
    assert decision.reason.startswith("staying: the best change (joint) would save ")


def test_a_transition_must_pay_within_its_lifetime() -> None:
    plan = layout(2, 2, 2)
    problem = problem_of(plan, {1: 0.5})
    assert decide(problem).name != "stay"
    short = replace(problem, options=Options(expected_lifetime_s=2.01))
    decision = decide(short)
    assert decision.plan is plan
    assert "would save" in decision.reason
    for one in decision.runners_up:
        assert one.candidate.effective_s > decision.effective_s
        assert "more to get there" in one.why


def test_effective_time_counts_the_transition() -> None:
    assert effective_s(2.0, 0.0, 100.0) == 2.0
    # Forty steps in what is left of a hundred seconds.
    assert effective_s(2.0, 20.0, 100.0) == pytest.approx(100 / 40)
    assert effective_s(2.0, 100.0, 100.0) == float("inf")


@pytest.mark.parametrize("sick", [{1: 0.0}, {0: 0.0, 3: 0.5}, {1: 0.0, 2: 0.0, 5: 0.0}])
def test_no_change_is_in_time_but_something_must_run(sick: dict[int, float]) -> None:
    """The fastest step is taken then, not the first idea; of equal steps the shortest way there."""
    problem = problem_of(layout(2, 2, 2), sick, options=TOO_SHORT)
    judge = Judge(problem, Predictor(problem))
    PLANNERS["joint"](problem, judge)
    assert {one.effective_s for one in judge.able} == {float("inf")}
    decision = decide(problem)
    figures = [(one.iteration_s, one.transition_s) for one in judge.able]
    assert (decision.iteration_s, decision.transition_s) == min(figures)
    assert decision.iteration_s < decide(problem, "progressive").iteration_s
    others = [one.candidate.iteration_s for one in decision.runners_up]
    assert others == sorted(others)
    # No worse than where transitions cost nothing.
    endless = replace(problem, options=Options(expected_lifetime_s=1e15))
    assert decision.iteration_s == pytest.approx(decide(endless).iteration_s, rel=0.01)


def test_a_job_that_can_go_on_waits_out_a_short_lifetime() -> None:
    problem = problem_of(layout(2, 2, 2), {1: 0.3}, options=TOO_SHORT)
    assert decide(problem).plan is problem.current


def test_what_is_in_time_goes_before_what_is_not() -> None:
    """The only layout that is in time need not be the fastest."""
    problem = problem_of(layout(2, 2, 2), {1: 0.0})
    judge = Judge(problem, Predictor(problem))
    PLANNERS["joint"](problem, judge)
    times = sorted({one.transition_s for one in judge.able})
    assert len(times) > 1
    between = Options(expected_lifetime_s=(times[0] + times[1]) / 2)
    decision = decide(replace(problem, options=between))
    assert decision.effective_s < float("inf")
    assert decision.transition_s <= times[0]
