"""Runs of a question: each policy meets the same faults, one run a seed, over all cores.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean

from resihp_ext.foresight.question import Question
from resihp_ext.reproduce.pool import run_tasks
from resihp_ext.simulator.capacity import capacity_ratio
from resihp_ext.simulator.engine import simulate
from resihp_ext.simulator.happenings import Happening
from resihp_ext.simulator.laws import sample
from resihp_ext.simulator.policies.registry import POLICIES
from resihp_ext.simulator.policy import Cause
from resihp_ext.simulator.record import Record, State

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of one run."""

    goodput_ratio: float
    """Over a job to which nothing happens."""
    capacity_ratio: float
    """Of all devices of the layout's number, over the run: no policy can do more for long."""
    tokens_a_day: float
    lost_h: Mapping[str, float]
    """Hours of all devices together, by what they were spent on instead of useful steps."""
    deaths: int
    """Times that somebody's death was answered."""
    changes: int
    redone_steps: int
    alarms: int
    false_alarms: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, to be done by whatever process."""

    question: Question
    policy: str
    seed: int

    def __hash__(self) -> int:
        return hash((self.policy, self.seed, self.question.spare_nodes))

    def run(self) -> Outcome:
        """Does it."""
        return outcome(self.question, record(self.question, self.policy, self.seed), self.seed)

    def __repr__(self) -> str:
        return f"policy {self.policy}, seed {self.seed}"


def record(question: Question, policy: str, seed: int) -> Record:
    """Everything about one run."""
    setting = replace(question.setting, seed=seed)
    happenings = _happenings(question, seed)
    return simulate(setting, POLICIES[policy](), happenings, until_s=question.until_s)


def _happenings(question: Question, seed: int) -> tuple[Happening, ...]:
    return sample(question.setting.cluster, question.sources, until_s=question.until_s, seed=seed)


def outcome(question: Question, found: Record, seed: int) -> Outcome:
    """The figures of a run."""
    used = {rank for one in question.setting.nominal.replicas for rank in one.ranks}
    devices = len(used)
    hours = {
        state.value: devices * seconds / 3600
        for state, seconds in found.spent_s.items()
        if state is not State.TRAIN
    }
    slow_s = found.spent_s.get(State.TRAIN, 0.0) - found.steps * found.healthy_s
    hours["slower steps and steps again"] = devices * max(0.0, slow_s) / 3600
    bound = capacity_ratio(
        _happenings(question, seed), len(question.setting.cluster.devices), until_s=question.until_s
    )
    return Outcome(
        goodput_ratio=found.goodput_ratio,
        capacity_ratio=min(1.0, bound * len(question.setting.cluster.devices) / devices),
        tokens_a_day=found.throughput * 86_400,
        lost_h=dict(sorted(hours.items())),
        deaths=sum(one.cause is Cause.DEAD for one in found.changes),
        changes=len(found.changes),
        redone_steps=found.redone,
        alarms=found.alarms,
        false_alarms=found.false_alarms,
    )


@lru_cache(maxsize=64)
def interval(values: tuple[float, ...]) -> tuple[float, float]:
    """A 95 % confidence interval of the mean, by the bootstrap (Efron 1979), seeded."""
    if len(values) < 2:
        return values[0], values[0]
    rng = random.Random(0)
    means = sorted(fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    cut = int(RESAMPLES * (1 - CONFIDENCE) / 2)
    return means[cut], means[-1 - cut]


def run_all(
    question: Question,
    *,
    jobs: int,
    limit_s: float,
    done: Callable[[int], None] = lambda count: None,
) -> dict[str, list[Outcome]]:
    """All runs, by policy in the order of seeds.

    Raises:
        ReproduceError: a run has failed, or all took too long.
    """
    wanted = runs_of(question)
    found = run_tasks(wanted, jobs=jobs, limit_s=limit_s, done=done)
    return {
        policy: [found[one] for one in wanted if one.policy == policy]
        for policy in question.policies
    }


def runs_of(question: Question) -> list[Run]:
    """Every policy with every seed."""
    return [
        Run(question=question, policy=policy, seed=seed)
        for policy in question.policies
        for seed in question.seeds
    ]


def spares_needed(
    question: Question,
    *,
    jobs: int,
    limit_s: float,
    most: int = 8,
) -> dict[str, int | None]:
    """Fewest spare nodes with which the mean goodput reaches the goal, by policy; None: more than
    ``most``."""
    assert question.goal is not None
    left, found = list(question.policies), {}
    for nodes in range(most + 1):
        asked = replace(question.with_spares(nodes), policies=tuple(left))
        outcomes = run_all(asked, jobs=jobs, limit_s=limit_s) if left else {}
        for policy, runs in outcomes.items():
            if fmean(one.goodput_ratio for one in runs) >= question.goal:
                found[policy] = nodes
        left = [policy for policy in left if policy not in found]
    return {policy: found.get(policy) for policy in question.policies}


def ordered(outcomes: Mapping[str, Sequence[Outcome]]) -> list[str]:
    """Policies, the best first."""
    return sorted(outcomes, key=lambda name: -fmean(one.goodput_ratio for one in outcomes[name]))
