"""Where a rank stands in a plan, as upstream's flags and process groups express it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from resihp_ext.plan.plan import Instance, Plan, PlanError


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """One rank's place, and the pipeline that its Megatron believes to be part of.

    Megatron builds the layers of a stage out of a pipeline's layout. What other ranks hold does not
    matter for that, only which layers are this rank's and whether the first or last is among them.
    So every rank is told of three stages, the whole model in one, or one before and one after its
    own; a seat then depends on nothing but its own layers. A standby holds none.
    """

    rank: int
    num_layers: int
    replica: int
    """Number of replicas for a standby: none of them."""
    replicas: int
    members: tuple[int, ...]
    """Global ranks of the tensor-parallel group."""
    chunks: tuple[Instance, ...]
    """What the rank holds, one instance a model chunk; empty for a standby."""
    layers: tuple[tuple[int, int], ...]
    """First layer and one past the last of each chunk."""

    @classmethod
    def of(cls, plan: Plan, rank: int) -> Self:
        """Finds the seat of a rank.

        Raises:
            PlanError: the rank holds the first and the last stage and is to hold them apart.
        """
        mine = plan.instances_of(rank)
        seat = cls(
            rank=rank,
            num_layers=plan.num_layers,
            replica=mine[0].replica if mine else len(plan.replicas),
            replicas=len(plan.replicas),
            members=plan.stage(mine[0]).ranks if mine else (rank,),
            chunks=mine,
            layers=tuple(plan.stage(one).layers for one in mine),
        )
        if seat.first and seat.last and len(mine) > 1:
            raise PlanError(
                f"plan: rank {rank} holds the first and the last of several virtual stages; "
                "give them to different ranks, or make them one stage"
            )
        return seat

    @property
    def first(self) -> bool:
        """Whether it holds the embedding."""
        return bool(self.layers) and self.layers[0][0] == 0

    @property
    def last(self) -> bool:
        """Whether it holds the loss."""
        return bool(self.layers) and self.layers[-1][1] == self.num_layers

    @property
    def pipeline(self) -> int:
        """Stages that Megatron is told of."""
        return 1 if self.first and self.last else 3

    @property
    def stage(self) -> int:
        """This rank's among them."""
        return 0 if self.first else 2 if self.last else 1

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
        return len(self.layers) if len(self.layers) > 1 else None

    def same_modules(self, other: Seat) -> bool:
        """Whether the modules of the other seat serve here: same layers, cut in the same way."""
        return (self.members, self.layers) == (other.members, other.layers)

    def layout_text(self) -> str | None:
        """Upstream's text form of the layers of every stage; None when there is just one."""
        if self.pipeline == 1:
            return None
        own = self.layers or ((self.num_layers, self.num_layers),)
        depths = [high - low for low, high in own]
        before = [own[0][0], *(after[0] - one[1] for one, after in pairwise(own))]
        beyond = self.num_layers - own[-1][1]
        cells: list[int] = []
        for chunk, depth in enumerate(depths):
            end = beyond if chunk == len(depths) - 1 else 0
            row = [before[chunk], depth, end] if self.stage == 1 else [before[chunk], 0, depth]
            if self.stage == 0:
                row = [depth, end or (before[chunk + 1] if chunk + 1 < len(depths) else 0), 0]
            cells += row
        texts = ["t" * depth for depth in cells]
        texts[0], texts[-1] = "E" + texts[0], texts[-1] + "L"
        return "|".join(texts)

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
