"""From what the coordinator needs to a plan; pure.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from dataclasses import replace

from resihp_ext.control.actions import NeedPlan
from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import preset
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.plan.parts import Device, PlanError
from resihp_ext.plan.plan import Plan
from resihp_ext.scheduler.decide import decide
from resihp_ext.scheduler.infeasible import InfeasibleError
from resihp_ext.scheduler.problem import Problem


def answer(need: NeedPlan) -> tuple[str | None, str, int]:
    """The plan, what speaks against any, and its version."""
    brief = json.loads(need.problem)
    current = Plan.from_json(need.plan)
    devices = tuple(
        Device(rank=rank, node=node, p=1.0 if usable else 0.0)
        for rank, node, usable in need.devices
    )
    problem = Problem(
        cluster=Cluster(devices=devices, memory_bytes=brief["memory_bytes"]),
        shape=ModelShape(**brief["shape"]),
        cost=preset(brief["hardware"]),
        policy=MemoryPolicy(**brief["policy"]),
        current=current,
        nominal=Plan.from_json(brief["nominal"]),
    )
    version = current.version + 1
    try:
        decision = decide(problem, "joint")
    except (InfeasibleError, PlanError) as error:
        return None, str(error), version
    plan = replace(decision.plan, version=version, devices=devices)
    return plan.to_json(), decision.reason, version
