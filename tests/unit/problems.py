"""Small planning problems: a uniform layout, some devices dead or slow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.plan.plan import Plan, uniform_plan
from resihp_ext.scheduler.problem import Problem

GB = 10**9


def layout(
    tp: int, pp: int, dp: int, *, layers: int = 12, micro_batches: int = 12, spares: int = 0
) -> Plan:
    """A uniform plan, with devices on standby behind it; 8 devices a node."""
    plan = uniform_plan(num_layers=layers, tp=tp, pp=pp, dp=dp, micro_batches=micro_batches)
    more = range(tp * pp * dp, tp * pp * dp + spares)
    devices = (*plan.devices, *(replace(plan.devices[0], rank=r, node=r // 8) for r in more))
    return replace(plan, devices=devices)


def problem_of(plan: Plan, p_of: Mapping[int, float] | None = None, **changes: Any) -> Problem:
    """A plan whose devices have these throughputs now."""
    devices = tuple(replace(d, p=(p_of or {}).get(d.rank, d.p)) for d in plan.devices)
    memory_bytes = changes.pop("memory_bytes", 80 * GB)
    return Problem(
        cluster=Cluster(devices=devices, memory_bytes=memory_bytes),
        shape=changes.pop("shape", replace(MODELS["llama2-7b"], num_layers=plan.num_layers)),
        cost=changes.pop("cost", preset("a100")),
        policy=changes.pop("policy", MemoryPolicy()),
        current=plan,
        **changes,
    )


def depths_of(plan: Plan) -> list[tuple[int, ...]]:
    """Layers of each stage of each replica."""
    return [tuple(stage.depth for stage in one.stages) for one in plan.replicas]


def tps_of(plan: Plan) -> list[tuple[int, ...]]:
    """TP degree of each stage of each replica."""
    return [tuple(stage.tp for stage in one.stages) for one in plan.replicas]


def shares_of(plan: Plan) -> list[int]:
    """Micro-batches whose first stage each replica runs."""
    firsts = [route[0].replica for route in plan.routes]
    return [firsts.count(number) for number in range(len(plan.replicas))]
