"""A simulated job before anything happens: cluster, model, prices, layout, data.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import CostModel
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.plan.plan import Plan
from resihp_ext.scheduler.options import Options
from resihp_ext.scheduler.problem import Problem
from resihp_ext.simulator.documents import Documents
from resihp_ext.simulator.health import Health
from resihp_ext.simulator.times import Times


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One job; policies and the engine only read it."""

    name: str
    cluster: Cluster
    """All devices healthy."""
    shape: ModelShape
    """Sequences have its ``seq_length``."""
    cost: CostModel
    memory: MemoryPolicy
    nominal: Plan
    """The layout with every device healthy."""
    documents: Documents = field(default_factory=Documents)
    times: Times = field(default_factory=Times)
    seed: int = 0
    """Of documents and noise."""

    @property
    def devices_per_node(self) -> int:
        """Of the first node; nodes are alike."""
        first = self.cluster.devices[0].node
        return sum(one.node == first for one in self.cluster.devices)

    @property
    def step_tokens(self) -> int:
        """Tokens of a global batch."""
        return self.shape.tokens * self.nominal.micro_batches

    def problem(self, health: Health, current: Plan, lifetime_s: float | None = None) -> Problem:
        """What a planner is asked: devices as they are believed to be, and what runs.

        Args:
            lifetime_s: How long the answer is expected to last.
        """
        options = Options() if lifetime_s is None else Options(expected_lifetime_s=lifetime_s)
        return Problem(
            cluster=replace(self.cluster, devices=health.on(self.cluster.devices)),
            shape=self.shape,
            cost=self.cost,
            policy=self.memory,
            current=current,
            options=options,
            nominal=self.nominal,
        )
