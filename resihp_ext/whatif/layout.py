"""A plan cell by cell, as pictures and JSON show it.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from resihp_ext.plan.plan import Instance, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One instance of a stage."""

    ranks: tuple[int, ...]
    layers: tuple[int, int]
    """First, and one past the last."""
    micro_batches: int
    p: float
    """Of the slowest rank."""
    damage: tuple[tuple[int, float], ...]
    """Its ranks that are not healthy, with their speed."""
    changed: bool
    """Whether its ranks hold something else than before."""

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return len(self.ranks)

    @property
    def depth(self) -> int:
        """Number of layers."""
        return self.layers[1] - self.layers[0]


Layout = tuple[tuple[Cell, ...], ...]
"""Replicas by stages."""


def layout(plan: Plan, p_of: Mapping[int, float], before: Plan) -> Layout:
    """All cells of a plan.

    Args:
        p_of: Throughput of every device.
        before: What was there; the plan itself where there is nothing to compare.
    """
    visits: dict[Instance, int] = {}
    for route in plan.routes:
        for one in route:
            visits[one] = visits.get(one, 0) + 1
    known = {stage for one in before.replicas for stage in one.stages}
    return tuple(
        tuple(
            Cell(
                ranks=stage.ranks,
                layers=stage.layers,
                micro_batches=visits.get(Instance(replica=number, stage=place), 0),
                p=min(p_of[rank] for rank in stage.ranks),
                damage=tuple((rank, p_of[rank]) for rank in stage.ranks if p_of[rank] < 1),
                changed=stage not in known,
            )
            for place, stage in enumerate(one.stages)
        )
        for number, one in enumerate(plan.replicas)
    )


def standby(plan: Plan, p_of: Mapping[int, float]) -> tuple[int, ...]:
    """Live devices that hold no stage."""
    used = {rank for one in plan.replicas for rank in one.ranks}
    return tuple(rank for rank, p in sorted(p_of.items()) if p > 0 and rank not in used)


def ranges(ranks: Iterable[int]) -> str:
    """``0-3, 7``: in the order given, runs that ascend by one are joined."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{one[0]}-{one[-1]}" if len(one) > 1 else str(one[0]) for one in runs)
