"""Small and large simulated jobs, and what a policy is told of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from resihp_ext.cost.cluster import Cluster, usable_memory_bytes
from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.plan.plan import Plan, uniform_plan
from resihp_ext.simulator.health import Health, Link
from resihp_ext.simulator.layout import Layout
from resihp_ext.simulator.policy import Answer, Cause, Policy, View
from resihp_ext.simulator.setting import Setting


def job(
    *,
    tp: int = 4,
    pp: int = 4,
    dp: int = 2,
    micro_batches: int = 32,
    model: str = "llama2-13b",
    spares: int = 0,
) -> Setting:
    """Nodes of eight devices, and spare nodes behind them."""
    layers = MODELS[model].num_layers
    nominal = uniform_plan(num_layers=layers, tp=tp, pp=pp, dp=dp, micro_batches=micro_batches)
    first = len(nominal.devices)
    more = (replace(nominal.devices[0], rank=r, node=r // 8) for r in range(first, first + spares))
    devices = (*nominal.devices, *more)
    return Setting(
        name="test",
        cluster=Cluster(devices=devices, memory_bytes=usable_memory_bytes("a100")),
        shape=MODELS[model],
        cost=preset("a100"),
        memory=MemoryPolicy(sharded=True, sequence_parallel=True),
        nominal=replace(nominal, devices=devices),
    )


class Told:
    """A policy in a job, told one thing after the other."""

    def __init__(self, policy: Policy, setting: Setting) -> None:
        self.policy, self.setting = policy, setting
        self.layout: Layout | None = policy.begin(setting)
        self.held = self.layout

    def of(
        self,
        cause: Cause,
        p: Mapping[int, float] | None = None,
        links: Mapping[Link, float] | None = None,
        lost_s: float = 0.0,
    ) -> Answer:
        """Tells it, takes its answer, and checks the plan."""
        health = Health.of(p or {}, links)
        answer = self.policy.answer(
            View(
                setting=self.setting,
                cause=cause,
                layout=self.layout,
                health=health,
                now_s=0.0,
                lost_s=lost_s,
                held=self.held,
            )
        )
        if answer.layout is not None:
            plan = answer.layout.plan.validated()
            assert not health.dead & ranks_of(plan)
            assert plan.micro_batches == self.setting.nominal.micro_batches
            self.held = answer.layout
        self.layout = answer.layout
        return answer

    @property
    def plan(self) -> Plan:
        """What runs."""
        assert self.layout is not None
        return self.layout.plan


def ranks_of(plan: Plan) -> set[int]:
    """That hold a stage."""
    return {rank for one in plan.replicas for rank in one.ranks}


def shares_of(plan: Plan) -> list[int]:
    """Micro-batches of each replica."""
    firsts = [route[0].replica for route in plan.routes]
    return [firsts.count(number) for number in range(len(plan.replicas))]
