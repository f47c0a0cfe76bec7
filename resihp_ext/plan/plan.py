"""The Plan: frozen data from which everything else about a layout is derived.

A plan says which devices exist, which ranks form the stages of each replica, which layers each
stage holds, and which instances each micro-batch visits. Groups, sync domains, state maps and
programs are pure functions of it. Every rank derives the same plan from the same membership, and
compares digests before anything is executed.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Self

from resihp_ext.plan.parts import (
    Device,
    Instance,
    PlanError,
    Replica,
    Route,
    Stage,
    neighbours,
)

__all__ = [
    "Device",
    "Instance",
    "Plan",
    "PlanError",
    "Replica",
    "Route",
    "Stage",
    "neighbours",
    "uniform_plan",
]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A layout of the job. ``Plan.validated`` checks what can be checked without the model."""

    version: int
    """Counts the plans of a job, from 0."""
    num_layers: int
    devices: tuple[Device, ...]
    replicas: tuple[Replica, ...]
    routes: tuple[Route, ...]
    """``routes[m]``: where micro-batch ``m`` of the global batch runs."""

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a global batch."""
        return len(self.routes)

    @property
    def instances(self) -> tuple[Instance, ...]:
        """Every replica's instance of every stage, in ascending order."""
        return tuple(
            Instance(replica=number, stage=index)
            for number, one in enumerate(self.replicas)
            for index in range(len(one.stages))
        )

    @cached_property
    def hosts(self) -> tuple[Instance, ...]:
        """The lowest instance of every rank group, ascending: it names the group's actions."""
        return tuple(i for i in self.instances if self.host_of(i) == i)

    @cached_property
    def standby(self) -> tuple[int, ...]:
        """Live ranks that hold no stage."""
        used = {rank for replica in self.replicas for rank in replica.ranks}
        return tuple(d.rank for d in self.devices if d.alive and d.rank not in used)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON form: equal plans have equal digests on every machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def stage(self, instance: Instance) -> Stage:
        """The stage that an instance names."""
        return self.replicas[instance.replica].stages[instance.stage]

    def chunks(self, instance: Instance) -> tuple[Instance, ...]:
        """All instances on the ranks of this one, in the order of their layers.

        The place in this tuple is the number of the chunk; without virtual stages there is one.
        """
        return self._groups[instance]

    def host_of(self, instance: Instance) -> Instance:
        """The lowest instance on the same ranks."""
        return self._groups[instance][0]

    def instances_of(self, rank: int) -> tuple[Instance, ...]:
        """What a rank holds: the chunks of its group; nothing for a standby."""
        host = self.instance_of(rank)
        return self.chunks(host) if host else ()

    def instance_of(self, rank: int) -> Instance | None:
        """Where a rank works, the lowest of its chunks; None for a standby."""
        return self._host_of_rank.get(rank)

    def links(
        self, micro_batch: int, instance: Instance
    ) -> tuple[Instance | None, Instance | None]:
        """From where and to where a visit needs a transfer: :func:`neighbours` on other ranks."""
        group = self._groups[instance]
        before, after = neighbours(self.routes[micro_batch], instance)
        return None if before in group else before, None if after in group else after

    @cached_property
    def _groups(self) -> dict[Instance, tuple[Instance, ...]]:
        """The rank group of each instance, as its chunks."""
        by_ranks: dict[tuple[int, tuple[int, ...]], list[Instance]] = {}
        for instance in self.instances:
            key = (instance.replica, self.stage(instance).ranks)
            by_ranks.setdefault(key, []).append(instance)
        groups = map(tuple, by_ranks.values())
        return {instance: group for group in groups for instance in group}

    @cached_property
    def _host_of_rank(self) -> dict[int, Instance]:
        return {rank: host for host in self.hosts for rank in self.stage(host).ranks}

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of :meth:`to_json`.

        Raises:
            PlanError: not the JSON form of a plan.
        """
        try:
            return cls._from_fields(json.loads(text))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not the JSON form of a plan: {error!r}") from error

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Self:
        return cls(
            version=int(fields["version"]),
            num_layers=int(fields["num_layers"]),
            devices=tuple(Device(**device) for device in fields["devices"]),
            replicas=tuple(
                Replica(
                    stages=tuple(
                        Stage(
                            ranks=tuple(map(int, stage["ranks"])),
                            layers=(int(stage["layers"][0]), int(stage["layers"][1])),
                        )
                        for stage in one["stages"]
                    )
                )
                for one in fields["replicas"]
            ),
            routes=tuple(
                tuple(Instance(**instance) for instance in route) for route in fields["routes"]
            ),
        )

    def next_version(self, **changes: Any) -> Self:
        """A copy with ``changes`` and the next version number."""
        return replace(self, version=self.version + 1, **changes)

    def validated(self) -> Self:
        """Checks the plan and returns it.

        Raises:
            PlanError: the first thing that is wrong.
        """
        _check_devices(self)
        for number, one in enumerate(self.replicas):
            _check_layers(number, one, self.num_layers)
        for micro_batch, route in enumerate(self.routes):
            _check_route(self, micro_batch, route)
        if not self.routes:
            raise PlanError("plan: no micro-batches")
        return self


def _check_devices(plan: Plan) -> None:
    known = {device.rank: device for device in plan.devices}
    if len(known) != len(plan.devices):
        raise PlanError("plan: a global rank appears twice among the devices")
    seen: dict[int, tuple[str, int, Stage]] = {}
    for number, one in enumerate(plan.replicas):
        for index, stage in enumerate(one.stages):
            place = f"replica {number} stage {index}"
            if not stage.ranks:
                raise PlanError(f"plan: {place} has no ranks")
            if len(set(stage.ranks)) != stage.tp:
                raise PlanError(f"plan: {place} names a rank twice: {stage.ranks}")
            for rank in stage.ranks:
                if rank not in known or not known[rank].alive:
                    raise PlanError(f"plan: {place}: rank {rank} is not a live device")
                where, replica, other = seen.setdefault(rank, (place, number, stage))
                if (replica, other.ranks) != (number, stage.ranks):
                    raise PlanError(
                        f"plan: rank {rank} is in {where} and in {place}, with ranks {other.ranks} "
                        f"and {stage.ranks}: only stages of one replica may share ranks, all of "
                        "them and in the same order"
                    )


def _check_layers(number: int, one: Replica, num_layers: int) -> None:
    """Layers must add up: a model that silently loses layers trains without an error."""
    edges = [0, *(stage.layers[1] for stage in one.stages)]
    starts = [stage.layers[0] for stage in one.stages]
    if starts != edges[:-1] or edges[-1] != num_layers:
        found = [stage.layers for stage in one.stages]
        raise PlanError(f"plan: replica {number}: layers {found} do not cover 0..{num_layers}")
    if any(low >= high for low, high in pairwise(edges)):
        raise PlanError(f"plan: replica {number}: a stage without layers: {edges}")


def _check_route(plan: Plan, micro_batch: int, route: Route) -> None:
    where = f"plan: micro-batch {micro_batch}"
    at = 0
    for instance in route:
        if not (
            0 <= instance.replica < len(plan.replicas)
            and 0 <= instance.stage < len(plan.replicas[instance.replica].stages)
        ):
            raise PlanError(f"{where} visits {instance!r}, which does not exist")
        low, high = plan.stage(instance).layers
        if low != at:
            raise PlanError(f"{where} arrives at layer {at} but {instance!r} starts at layer {low}")
        at = high
    if at != plan.num_layers:
        raise PlanError(f"{where} ends after layer {at} of {plan.num_layers}")


def uniform_plan(
    *,
    num_layers: int,
    tp: int,
    pp: int,
    dp: int,
    micro_batches: int,
    virtual: int = 1,
    devices_per_node: int = 8,
) -> Plan:
    """Megatron's own grid: ranks in the order tp, dp, pp; equal shares of layers and micro-batches.

    With ``virtual`` chunks a rank, virtual stage ``k`` lies on the ranks of stage ``k % pp``.

    Raises:
        PlanError: layers or micro-batches do not divide evenly.
    """
    stages = pp * virtual
    if num_layers % stages or micro_batches % dp:
        raise PlanError(
            f"uniform plan: {num_layers} layers over {stages} stages, {micro_batches} "
            f"micro-batches over {dp} replicas: both must divide evenly"
        )
    depth = num_layers // stages
    replicas = tuple(
        Replica(
            stages=tuple(
                Stage(
                    ranks=tuple(((k % pp) * dp + d) * tp + t for t in range(tp)),
                    layers=(k * depth, (k + 1) * depth),
                )
                for k in range(stages)
            )
        )
        for d in range(dp)
    )
    routes = tuple(
        tuple(Instance(replica=m % dp, stage=k) for k in range(stages))
        for m in range(micro_batches)
    )
    devices = tuple(Device(rank=r, node=r // devices_per_node) for r in range(tp * pp * dp))
    return Plan(
        version=0, num_layers=num_layers, devices=devices, replicas=replicas, routes=routes
    ).validated()
