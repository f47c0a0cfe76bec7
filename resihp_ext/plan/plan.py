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

from resihp_ext.errors import ResiHPError


class PlanError(ResiHPError):
    """A plan that cannot be executed; the text names the place and both sides of the equation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """One accelerator (or CPU rank) of the cluster."""

    rank: int
    """``global_rank``: identity of its process for the whole job."""
    node: int
    p: float = 1.0
    """Normalised throughput: 1.0 healthy, 0.5 twice as slow, 0.0 dead."""

    @property
    def alive(self) -> bool:
        """Whether it can take part at all."""
        return self.p > 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One replica's instance of a pipeline stage."""

    ranks: tuple[int, ...]
    """Global ranks in the order of ``tp_rank``."""
    layers: tuple[int, int]
    """First layer and one past the last."""

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return len(self.ranks)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.layers[1] - self.layers[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """One copy of the model, cut into stages."""

    stages: tuple[Stage, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """All its ranks, stage by stage."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Instance:
    """A place that a micro-batch visits: one replica's instance of one stage."""

    replica: int
    stage: int

    def __str__(self) -> str:
        return f"{self.replica}.{self.stage}"


Route = tuple[Instance, ...]
"""The instances one micro-batch visits, first layer to last."""


def neighbours(route: Route, instance: Instance) -> tuple[Instance | None, Instance | None]:
    """Where a micro-batch comes from and where it goes; None at the ends of its route."""
    place = route.index(instance)
    before = route[place - 1] if place else None
    return before, route[place + 1] if place + 1 < len(route) else None


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

    def instance_of(self, rank: int) -> Instance | None:
        """Where a rank works; None for a standby."""
        for number, one in enumerate(self.replicas):
            for index, stage in enumerate(one.stages):
                if rank in stage.ranks:
                    return Instance(replica=number, stage=index)
        return None

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
    seen: dict[int, str] = {}
    for number, one in enumerate(plan.replicas):
        for index, stage in enumerate(one.stages):
            place = f"replica {number} stage {index}"
            if not stage.ranks:
                raise PlanError(f"plan: {place} has no ranks")
            for rank in stage.ranks:
                if rank not in known or not known[rank].alive:
                    raise PlanError(f"plan: {place}: rank {rank} is not a live device")
                if rank in seen:
                    raise PlanError(f"plan: rank {rank} is in {seen[rank]} and in {place}")
                seen[rank] = place


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
    *, num_layers: int, tp: int, pp: int, dp: int, micro_batches: int, devices_per_node: int = 8
) -> Plan:
    """Megatron's own grid: ranks in the order tp, dp, pp; equal shares of layers and micro-batches.

    Raises:
        PlanError: layers or micro-batches do not divide evenly.
    """
    if num_layers % pp or micro_batches % dp:
        raise PlanError(
            f"uniform plan: {num_layers} layers over {pp} stages, {micro_batches} micro-batches "
            f"over {dp} replicas: both must divide evenly"
        )
    depth = num_layers // pp
    replicas = tuple(
        Replica(
            stages=tuple(
                Stage(
                    ranks=tuple((s * dp + d) * tp + t for t in range(tp)),
                    layers=(s * depth, (s + 1) * depth),
                )
                for s in range(pp)
            )
        )
        for d in range(dp)
    )
    routes = tuple(
        tuple(Instance(replica=m % dp, stage=s) for s in range(pp)) for m in range(micro_batches)
    )
    devices = tuple(Device(rank=r, node=r // devices_per_node) for r in range(tp * pp * dp))
    return Plan(
        version=0, num_layers=num_layers, devices=devices, replicas=replicas, routes=routes
    ).validated()
