"""Where a rank stands in a plan, as upstream's flags and process groups express it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from resihp_ext.plan.plan import Instance, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """One rank's place: the pipeline of its own replica, and where it sits in it.

    A standby sits between an embedding with all layers and a loss, in a stage that holds nothing:
    it builds a model without parameters, and takes part in whatever all ranks do.
    """

    rank: int
    replica: int
    """Number of replicas for a standby: none of them."""
    replicas: int
    stage: int
    """Physical stage."""
    depths: tuple[int, ...]
    """Layers of every (virtual) stage of the replica, first layer to last."""
    pipeline: int
    """Physical stages of the replica."""
    members: tuple[int, ...]
    """Global ranks of the tensor-parallel group."""
    chunks: tuple[Instance, ...]
    """What the rank holds, one instance a model chunk; empty for a standby."""
    layers: tuple[tuple[int, int], ...]
    """First layer and one past the last of each chunk."""

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Self:
        """Finds the seat of a rank."""
        mine = plan.instances_of(rank)
        if not mine:
            return cls(
                rank=rank,
                replica=len(plan.replicas),
                replicas=len(plan.replicas),
                stage=1,
                depths=(plan.num_layers, 0, 0),
                pipeline=3,
                members=(rank,),
                chunks=(),
                layers=(),
            )
        stages = plan.replicas[mine[0].replica].stages
        return cls(
            rank=rank,
            replica=mine[0].replica,
            replicas=len(plan.replicas),
            stage=mine[0].stage,
            depths=tuple(stage.depth for stage in stages),
            pipeline=len({stage.ranks for stage in stages}),
            members=plan.stage(mine[0]).ranks,
            chunks=mine,
            layers=tuple(plan.stage(one).layers for one in mine),
        )

    @property
    def tp(self) -> int:
        """Tensor-parallel degree."""
        return len(self.members)

    @property
    def tp_rank(self) -> int:
        """Rank in the tensor-parallel group."""
        return self.members.index(self.rank)

    @property
    def virtual(self) -> int | None:
        """Model chunks a rank, None without virtual stages."""
        chunks = len(self.depths) // self.pipeline
        return chunks if chunks > 1 else None

    def same_modules(self, other: Seat) -> bool:
        """Whether the modules of the other seat serve here: same layers, cut in the same way."""
        return (self.members, self.layers) == (other.members, other.layers)

    def layout_text(self) -> str | None:
        """Upstream's text form of the layers of every stage; None for a single stage."""
        if len(self.depths) == 1:
            return None
        cells = ["t" * depth for depth in self.depths]
        cells[0], cells[-1] = "E" + cells[0], cells[-1] + "L"
        return "|".join(cells)

    def flags(self, words: Sequence[str]) -> list[str]:
        """The command line of the job as this rank's Megatron has to see it.

        Args:
            words: The user's words, presets resolved.
        """
        kept = [word for word in words if self.tp > 1 or word != "--sequence-parallel"]
        kept += ["--tensor-model-parallel-size", str(self.tp)]
        kept += ["--pipeline-model-parallel-size", str(self.pipeline)]
        layout = self.layout_text()
        return kept if layout is None else [*kept, "--pipeline-model-parallel-layout", layout]
