"""The unit of work: one configuration, one draw of faults, some policies.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from resihp_ext.reproduce.ablated import made as policy_of
from resihp_ext.reproduce.scenarios import Drawn, Scenario
from resihp_ext.simulator.capacity import capacity_ratio
from resihp_ext.simulator.engine import simulate
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.iteration import Iterations
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.presets import Assumptions, setting
from resihp_ext.simulator.record import State
from resihp_ext.simulator.setting import Setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One policy in one run."""

    policy: str
    goodput_ratio: float
    """Over a job to which nothing happens, from the first fault on."""
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
    assumptions: Assumptions = field(default_factory=Assumptions)

    def run(self) -> Runs:
        """All policies meet the same faults."""
        made = setting(self.configuration, assumptions=self.assumptions, seed=self.seed)
        iterations = Iterations(made)
        healthy = iterations.look(Layout(plan=made.nominal), Health())
        drawn = self.scenario.drawn(made, float(healthy.iteration_s.mean()), self.seed)
        ran = tuple(self._ran(name, made, drawn, iterations) for name in self.policies)
        devices = len(made.cluster.devices)
        bound = capacity_ratio(
            drawn.happenings, devices, begin_s=drawn.begin_s, until_s=drawn.until_s
        )
        return Runs(capacity_ratio=bound, ran=ran)

    def _ran(self, name: str, made: Setting, drawn: Drawn, iterations: Iterations) -> Ran:
        policy = policy_of(name)
        record = simulate(
            made, policy, drawn.happenings, until_s=drawn.until_s, iterations=iterations
        )
        spent_s = record.spent_s
        waited_s = spent_s.get(State.WAIT, 0.0)
        before = sum(one.steps for one in record.stretches if one.end_s <= drawn.begin_s)
        # A job that falls back to before the first fault has done less than nothing since.
        steps, seconds = max(0, record.steps - before), drawn.until_s - drawn.begin_s
        return Ran(
            policy=name,
            goodput_ratio=steps * record.healthy_s / seconds,
            tokens_per_s=steps * record.step_tokens / seconds,
            waited_s=waited_s,
            stood_s=record.seconds - waited_s - spent_s.get(State.TRAIN, 0.0),
            changes=len(record.changes),
            alarms=record.alarms,
            false_alarms=record.false_alarms,
            redone=record.redone,
        )
