"""What a plan is made of: devices, stages, replicas, and the places that a micro-batch visits.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    """One copy of the model, cut into stages.

    Stages with the same ranks are the chunks of one rank group (interleaved pipelines): the ranks
    hold all of them and run them in turn.
    """

    stages: tuple[Stage, ...]
    """In the order of their layers."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """All its ranks, stage by stage, each once."""
        return tuple(dict.fromkeys(rank for stage in self.stages for rank in stage.ranks))


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
