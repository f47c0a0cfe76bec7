"""The unit of work: one configuration, one draw of faults, some policies.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.reproduce.ablated import ABLATED
from resihp_ext.reproduce.scenarios import Scenario
from resihp_ext.simulator.capacity import capacity_ratio
from resihp_ext.simulator.engine import simulate
from resihp_ext.simulator.iteration import Iterations
from resihp_ext.simulator.policies.registry import policy_named
from resihp_ext.simulator.presets import Assumptions, setting
from resihp_ext.simulator.record import State


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One policy in one run."""

    policy: str
    goodput_ratio: float
    """Over a job to which nothing happens."""
    tokens_per_s: float
    waited_s: float
    """No layout held the model."""
    stood_s: float
    """Changes, validations, notices, broken iterations, checkpoints."""
    changes: int
    alarms: int
    false_alarms: int
    redone: int
    """Iterations done again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runs:
    """All policies in one run, and what no policy can pass."""

    capacity_ratio: float
    ran: tuple[Ran, ...]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run; equal cases give equal results."""

    configuration: str
    scenario: Scenario
    seed: int
    policies: tuple[str, ...]
    assumptions: Assumptions = Assumptions()

    def run(self) -> Runs:
        """All policies meet the same faults."""
        made = setting(self.configuration, assumptions=self.assumptions, seed=self.seed)
        happenings = self.scenario.happenings(made, self.seed)
        iterations = Iterations(made)
        ran = []
        for name in self.policies:
            policy = ABLATED[name]() if name in ABLATED else policy_named(name)
            until_s = self.scenario.until_s
            record = simulate(made, policy, happenings, until_s=until_s, iterations=iterations)
            spent_s = record.spent_s
            waited_s = spent_s.get(State.WAIT, 0.0)
            ran.append(
                Ran(
                    policy=name,
                    goodput_ratio=record.goodput_ratio,
                    tokens_per_s=record.throughput,
                    waited_s=waited_s,
                    stood_s=record.seconds - waited_s - spent_s.get(State.TRAIN, 0.0),
                    changes=len(record.changes),
                    alarms=record.alarms,
                    false_alarms=record.false_alarms,
                    redone=record.redone,
                )
            )
        devices = len(made.cluster.devices)
        bound = capacity_ratio(happenings, devices, self.scenario.until_s)
        return Runs(capacity_ratio=bound, ran=tuple(ran))
