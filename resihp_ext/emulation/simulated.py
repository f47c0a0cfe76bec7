"""A simulated job that is the same as an emulated one: from the files that both have.

The scene of the emulation says model, devices and how fast time passes; the job's folder says which
plans it ran and which documents were in its micro-batches. What is left to compare is the walk of
the program against eight processes that wait and send.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from resihp_ext.cost.cluster import Cluster
from resihp_ext.cost.cost_model import CostModel
from resihp_ext.cost.layer_cost import Rates
from resihp_ext.cost.link import Link
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.detector.slots import Array
from resihp_ext.emulation.prices import enlarged
from resihp_ext.emulation.scene import Scene
from resihp_ext.errors import UserError
from resihp_ext.events import Event
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import Duration, one_forward_one_backward
from resihp_ext.simulator.iteration import POOL
from resihp_ext.simulator.layout import Layout, Schedule
from resihp_ext.simulator.setting import Setting

LOCAL = MemoryPolicy(param_bytes=4, master_bytes=0, fused=False)
"""Of jobs on a CPU: parameters in 32 bits, local layers."""
ENDLESS_BYTES = 2**62


def setting_of(scene: Scene, plan: Plan, policy: MemoryPolicy = LOCAL) -> Setting:
    """The job, as large as the model behind the one that is run.

    Args:
        plan: The first one of the job, of the small model.
        policy: What the job does that costs time.

    Raises:
        UserError: the layers of the two models do not divide, or costs cannot be scaled.
    """
    cost = scaled(scene.cost, scene.time_scale)
    nominal = large(plan, scene)
    cluster = Cluster(devices=nominal.devices, memory_bytes=ENDLESS_BYTES)
    return Setting(
        name=f"emulated {scene.shape.name}",
        cluster=cluster,
        shape=scene.shape,
        cost=cost,
        memory=policy,
        nominal=nominal,
        seed=scene.seed,
    )


def large(plan: Plan, scene: Scene) -> Plan:
    """A plan of the job with the layers of the large model; devices as fast as it believes."""
    return replace(enlarged(plan, scene.shape.num_layers), devices=plan.devices)


def layout_of(plan: Plan, scene: Scene) -> Layout:
    """A plan of the job, with the order of work that jobs use."""
    return Layout(plan=large(plan, scene), schedule=Schedule(name="as in jobs", build=as_in_jobs))


def as_in_jobs(plan: Plan, duration: Duration) -> Program:
    """1F1B by layers, degrees and speeds alone: a running job has no prices."""
    return one_forward_one_backward(plan)


def scaled(cost: CostModel, times: float) -> CostModel:
    """Everything takes so many times as long, but for the fixed part of a change.

    Raises:
        UserError: a profile's coefficients: jobs emulate presets only.
    """
    layers = cost.layers
    if not isinstance(layers, Rates):
        raise UserError(f"emulation: {cost.name}: only presets of devices are emulated")
    return replace(
        cost,
        layers=replace(
            layers,
            matrix_flops=layers.matrix_flops / times,
            attention_flops=layers.attention_flops / times,
            memory_bytes_per_s=layers.memory_bytes_per_s / times,
        ),
        inside=_slower(cost.inside, times),
        between=_slower(cost.between, times),
        step_parameter_s=cost.step_parameter_s * times,
    )


def _slower(link: Link, times: float) -> Link:
    return Link(latency_s=link.latency_s * times, bytes_per_s=link.bytes_per_s / times)


def squares_of(
    events: Iterable[Mapping[str, Any]], plans: Mapping[int, Plan], scene: Scene, seq_length: int
) -> Array:
    """Sums of squared segment lengths of the large model, from what a job has recorded.

    Args:
        plans: By version.
        seq_length: Of the model that is run.

    Returns:
        Shape ``(micro-batches, POOL)``: column ``step - 1``; 0 where nothing was recorded.
    """
    first = plans[min(plans)]
    found: Array = np.zeros((first.micro_batches, POOL))
    ratio = scene.shape.seq_length / seq_length
    for one in events:
        if one["event"] != Event.MICRO_BATCHES or not 1 <= int(one["step"]) <= POOL:
            continue
        plan = plans.get(int(one["plan"]))
        if plan is None:
            continue
        mine = [m for m, route in enumerate(plan.routes) if route[0].replica == one["replica"]]
        for number, batch in zip(mine, one["micro_batches"], strict=True):
            squared = sum(int(length) ** 2 for length in batch["segments"])
            found[number, int(one["step"]) - 1] = squared * ratio**2
    return found
