"""Where the time of a step goes in real ranks, one of which is slow inside its own work."""

from __future__ import annotations

import itertools
import os
import time
from collections import defaultdict
from statistics import median
from typing import Any

import msgspec
import pytest

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.parity import MODEL
from megatron.resilience.testing.trial import Trial, run_trial
from resihp_ext.detector.timed import RankStep
from resihp_ext.events import Event
from resihp_ext.plan.action import Kind

pytestmark = pytest.mark.dist

STEPS, MICRO_BATCHES, SLOW_S = 5, 8, 0.03
SLOW, PARTNER, BEHIND = 1, 0, 2
PLAN = """
- step: 0
  replicas:
    - [{ranks: [0, 1], layers: 2}, {ranks: [2], layers: 2}]
"""


def slow_inside() -> None:
    """Lets one rank sleep in its forward actions, before the model's first collective."""
    from megatron.resilience.upstream import forward

    if int(os.environ["RANK"]) != SLOW:
        return
    original: Any = forward._run

    def slow(*args: Any) -> Any:
        time.sleep(SLOW_S)
        return original(*args)

    forward._run = slow  # type: ignore[assignment]


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """With an evaluation after the second step and the fourth."""
    folder = tmp_path_factory.mktemp("times")
    data = write_corpus(folder / "data", documents=150)
    plan = folder / "plans.yaml"
    plan.write_text(PLAN)
    words = f"""
        --global-batch-size {MICRO_BATCHES} --train-iters {STEPS} --packed-sequences
        --split 80,20,0 --eval-iters 2 --eval-interval 2 --use-distributed-optimizer
        --resilience-timings-steps 1
    """
    argv = [*MODEL, "--data-path", str(data), *words.split()]
    argv += ["--resilience-plan-schedule", str(plan)]
    return run_trial(argv, world_size=3, before=slow_inside)


@pytest.fixture(scope="module")
def steps(trial: Trial) -> dict[int, list[RankStep]]:
    """Of each rank, in order."""
    found: dict[int, list[RankStep]] = defaultdict(list)
    for event in trial.events:
        if event["event"] == Event.STEP_TIMES:
            times = msgspec.convert(event["times"], RankStep)
            assert (times.rank, times.step) == (event["rank"], event["step"])
            found[times.rank].append(times)
    return found


def medians(steps: list[RankStep], kind: Kind) -> tuple[float, float]:
    """Own time and wait of an action, after the first step."""
    actions = [one for step in steps[1:] for one in step.actions if one.kind is kind]
    return median(one.own_s for one in actions), median(one.wait_s for one in actions)


@pytest.mark.timeout(300)
def test_every_step_and_action_is_there_once(steps: dict[int, list[RankStep]]) -> None:
    assert sorted(steps) == [0, 1, 2]
    sends = {0: [Kind.SEND_FORWARD, Kind.RECV_BACKWARD], 2: [Kind.RECV_FORWARD, Kind.SEND_BACKWARD]}
    sends[1] = sends[0]
    for rank, of_rank in steps.items():
        assert [step.step for step in of_rank] == list(range(1, STEPS + 1))
        for step in of_rank:
            found = sorted((str(one.kind), one.micro_batch) for one in step.actions)
            kinds = [Kind.FORWARD, Kind.BACKWARD, *sends[rank]]
            each = [(str(kind), number) for kind in kinds for number in range(MICRO_BATCHES)]
            assert found == sorted([*each, ("SYNC", -1), ("STEP", -1)])


def test_a_slow_rank_is_told_from_the_partner_that_waits_for_it(
    steps: dict[int, list[RankStep]],
) -> None:
    slow_own_s, slow_wait_s = medians(steps[SLOW], Kind.FORWARD)
    own_s, wait_s = medians(steps[PARTNER], Kind.FORWARD)
    assert slow_own_s > SLOW_S
    assert own_s < slow_own_s - 0.7 * SLOW_S
    assert wait_s > slow_wait_s + 0.7 * SLOW_S
    assert medians(steps[BEHIND], Kind.FORWARD)[0] < slow_own_s - 0.5 * SLOW_S
    assert medians(steps[BEHIND], Kind.FORWARD)[1] == 0.0, "it has no partners"
    assert medians(steps[BEHIND], Kind.RECV_FORWARD)[0] == 0.0


def test_actions_fill_the_step_and_steps_fill_the_run(steps: dict[int, list[RankStep]]) -> None:
    for of_rank in steps.values():
        for step in of_rank[1:]:
            gaps_s, at_s = 0.0, 0.0
            for action in step.actions:
                assert action.start_s >= at_s - 1e-6, "one after the other"
                gaps_s, at_s = gaps_s + action.start_s - at_s, action.end_s
            assert at_s <= step.total_s
            inside_s = sum(one.own_s + one.wait_s for one in step.actions)
            assert inside_s + gaps_s == pytest.approx(step.total_s, rel=0.03)
            assert inside_s > 0.7 * step.total_s
        for first, second in itertools.pairwise(of_rank):
            apart_s = second.begun_s - first.begun_s - first.total_s
            if first.step % 2:
                assert apart_s == pytest.approx(0.0, abs=0.01)
            else:
                assert apart_s > 2 * SLOW_S, "an evaluation between them is in neither"


def test_lengths_are_those_that_the_job_has_trained_on(
    trial: Trial, steps: dict[int, list[RankStep]]
) -> None:
    expected = {
        event["step"]: [
            (one["tokens"], sum(length**2 for length in one["segments"]))
            for one in event["micro_batches"]
        ]
        for event in trial.events
        if event["event"] == Event.MICRO_BATCHES
    }
    assert len(expected) == STEPS
    for of_rank in steps.values():
        for step in of_rank:
            assert [one.number for one in step.micro_batches] == list(range(MICRO_BATCHES))
            found = [(one.tokens, one.squared) for one in step.micro_batches]
            assert found == expected[step.step]
