"""The last thing that members do together when a job cannot go on: save what they hold.

For that the state has to fit, no step: so they take a layout of one replica, with as many stages as
there are ranks, which needs the least memory of all and divides nothing but layers.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.control.job_state import Job, KnownPlan
from resihp_ext.errors import ResiHPError
from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Stage


def holding_plan(job: Job) -> KnownPlan | None:
    """A layout of the members just to hold the state; None if there is none."""
    if job.plan is None:
        return None
    need = job.need("", job.members)
    try:
        plan = _held_by(Plan.from_json(job.plan.text), need.devices, need.version)
        return KnownPlan.of(plan.to_json())
    except (ResiHPError, ValueError, KeyError, TypeError):
        return None  # what ran was no plan of a model


def _held_by(plan: Plan, devices: tuple[tuple[int, int, float], ...], version: int) -> Plan:
    ranks = [rank for rank, _, usable in devices if usable][: plan.num_layers]
    edges = [plan.num_layers * place // len(ranks) for place in range(len(ranks) + 1)]
    stages = tuple(
        Stage(ranks=(rank,), layers=(edges[place], edges[place + 1]))
        for place, rank in enumerate(ranks)
    )
    route = tuple(Instance(replica=0, stage=place) for place in range(len(stages)))
    return Plan(
        version=version,
        num_layers=plan.num_layers,
        devices=tuple(
            Device(rank=rank, node=node, p=float(usable)) for rank, node, usable in devices
        ),
        replicas=(Replica(stages=stages),),
        routes=(route,) * plan.micro_batches,
    ).validated()
