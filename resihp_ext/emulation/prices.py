"""What every action of a plan takes on the devices that are emulated.

The plan is that of the tiny model that is really run. Each of its layers stands for as many of the
large model's, and each of its tokens for as many of the large model's.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from random import Random

from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.plan_cost import Workload
from resihp_ext.emulation.scene import Scene
from resihp_ext.errors import UserError
from resihp_ext.plan.action import COMPUTE, Action, Kind
from resihp_ext.plan.plan import Instance, Plan, Replica, Stage


def enlarged(plan: Plan, num_layers: int) -> Plan:
    """The same ranks with as many layers as a larger model has, all devices healthy.

    Raises:
        UserError: the layers do not divide.
    """
    if num_layers % plan.num_layers:
        raise UserError(
            f"emulation: {num_layers} layers cannot stand behind the {plan.num_layers} that are "
            "run; give a multiple (layers)"
        )
    times = num_layers // plan.num_layers
    replicas = tuple(
        Replica(
            stages=tuple(
                Stage(ranks=one.ranks, layers=(one.layers[0] * times, one.layers[1] * times))
                for one in each.stages
            )
        )
        for each in plan.replicas
    )
    devices = tuple(replace(one, p=float(one.alive)) for one in plan.devices)
    return replace(plan, num_layers=num_layers, replicas=replicas, devices=devices)


class Prices:
    """Seconds of every action under one plan, on a healthy device, as they pass in this job."""

    def __init__(self, scene: Scene, plan: Plan, seq_length: int, policy: MemoryPolicy) -> None:
        """Looks at a plan.

        Args:
            plan: Of the model that is run.
            seq_length: Of its sequences.

        Raises:
            UserError: the layers do not divide.
        """
        self._scene = scene
        self._cost = scene.cost.of_plan(
            enlarged(plan, scene.shape.num_layers), scene.shape, policy=policy
        )
        self._tokens = scene.shape.seq_length / seq_length
        self._fixed = lru_cache(maxsize=None)(self._cost.action_s)

    def seconds(self, instance: Instance, action: Action, work: Workload | None = None) -> float:
        """Of one action.

        Args:
            work: Of its micro-batch, in tokens of the model that is run; None: full sequences.
        """
        if work is None or action.kind not in COMPUTE:
            return self._fixed(instance, action) * self._scene.time_scale
        large = Workload(
            tokens=round(work.tokens * self._tokens), squared=round(work.squared * self._tokens**2)
        )
        return self._cost.compute_s(instance, action.kind, large) * self._scene.time_scale


class Speed:
    """How fast the device of a rank is at a step, and how much its times vary."""

    def __init__(self, scene: Scene, rank: int) -> None:
        self._scene, self._rank = scene, rank

    def noise(self, step: int, action: Action | str) -> float:
        """A factor around 1; the same for the same seed, rank, step and action."""
        if not self._scene.noise:
            return 1.0
        seed = f"{self._scene.seed}/{self._rank}/{step}/{action}"
        return Random(seed).lognormvariate(0.0, self._scene.noise)

    def seconds(self, healthy_s: float, step: int, action: Action, left: float = 1.0) -> float:
        """What takes ``healthy_s`` on a healthy device.

        Args:
            left: Part of the speed that faults leave at this step.
        """
        own = 1.0 if action.kind is Kind.SYNC else self._scene.speed.get(self._rank, 1.0) * left
        return healthy_s / own * self.noise(step, action)
