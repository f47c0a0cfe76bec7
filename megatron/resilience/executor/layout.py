"""Everything that all ranks hold under a plan: sync domains, shares of state, and groups of
hyperparameters, derived alike on every rank from what each says it holds."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch

from megatron.resilience.executor.manifest import Piece, exchange_texts
from resihp_ext.state.domains import SyncDomain, sync_domains
from resihp_ext.state.keepers import Keepers, Redundancy, keepers
from resihp_ext.state.slab import Holdings, Slab, segments


@dataclass(frozen=True, kw_only=True)
class StateLayout:
    """Who holds which parameters, and who keeps which part of the optimizer's state."""

    parameters: Mapping[int, tuple[Slab, ...]]
    """What the modules of each rank hold."""
    groups: Mapping[str, int]
    """Number of the optimizer's parameter group of each logical tensor."""
    redundancy: Redundancy
    """Who keeps the optimizer's state."""
    nodes: Mapping[int, int]
    """Node of every live rank."""

    @classmethod
    def exchanged(
        cls,
        pieces: Sequence[Piece],
        groups: Mapping[str, int],
        *,
        ranks: Sequence[int],
        redundancy: Redundancy,
        nodes: Mapping[int, int],
        device: torch.device,
    ) -> Self:
        """Builds the layout from what every rank says it holds; collective over all live ranks.

        Args:
            pieces: What this rank holds.
            groups: Parameter group of each tensor that this rank holds.
            ranks: The live ranks.
            redundancy: Who keeps the optimizer's state.
            nodes: Node of every live rank.
            device: Where the backend wants its tensors.
        """
        rows = [
            [piece.slab.tensor, piece.slab.low, piece.slab.high, groups[piece.slab.tensor]]
            for piece in pieces
        ]
        everyone: dict[int, tuple[Slab, ...]] = {}
        names: dict[str, int] = {}
        for rank, text in zip(ranks, exchange_texts(json.dumps(rows), device), strict=True):
            found = json.loads(text)
            everyone[rank] = tuple(
                Slab(tensor=name, low=tuple(low), high=tuple(high)) for name, low, high, _ in found
            )
            names.update({name: group for name, _, _, group in found})
        return cls(parameters=everyone, groups=names, redundancy=redundancy, nodes=nodes)

    @cached_property
    def domains(self) -> tuple[SyncDomain, ...]:
        """Sync domains in the order in which all ranks visit theirs.

        Inside a domain the slabs of one parameter group lie side by side, so that the optimizer
        updates a group by one flat tensor; and what is one parameter in a module, mostly does, so
        that it need not be copied.
        """
        return tuple(
            SyncDomain(
                owners=domain.owners,
                slabs=tuple(
                    sorted(
                        (part for slab in domain.slabs for part in _by_layer(slab)),
                        key=lambda slab: (self.groups[slab.tensor], slab),
                    )
                ),
            )
            for domain in sync_domains(self.parameters)
        )

    @cached_property
    def keepers(self) -> tuple[Keepers, ...]:
        """Who reduces each domain, and keeps which part of its state."""
        return keepers(self.domains, self.redundancy, self.nodes)

    @classmethod
    def of_state(
        cls, state: Holdings, *, groups: Mapping[str, int], nodes: Mapping[int, int]
    ) -> Self:
        """A layout in which modules hold nothing, for state that is kept elsewhere."""
        found = cls(
            parameters=dict.fromkeys(state, ()),
            groups=groups,
            redundancy="replicated",
            nodes=nodes,
        )
        vars(found)["state"] = {rank: tuple(slabs) for rank, slabs in state.items()}
        return found

    def lost(self, ranks: Collection[int]) -> Slab | None:
        """A part of the state that nobody has but others than some ranks; None if all is left."""
        for slab, (owners,) in segments(self.state).items():
            if owners and not owners & set(ranks):
                return slab
        return None

    def among(self, ranks: Collection[int], *, masters_only: bool = False) -> Self:
        """What of it is left with some ranks: who kept what is not decided anew.

        Args:
            masters_only: Whether what modules hold does not count.
        """
        left = {
            rank: () if masters_only else slabs
            for rank, slabs in self.parameters.items()
            if rank in ranks
        }
        state = {rank: slabs for rank, slabs in self.state.items() if rank in ranks}
        found = replace(self, parameters=left)
        # A cached property's value is kept under its name.
        vars(found).update(domains=self.domains, keepers=self.keepers, state=state)
        return found

    @cached_property
    def counted(self) -> Mapping[int, tuple[Slab, ...]]:
        """For each rank, parts of the state that it keeps; together all of it, and each just once,
        evenly spread."""
        found: dict[int, list[Slab]] = {rank: [] for rank in self.state}
        load = dict.fromkeys(sorted(self.state), 0)
        for slab, (owners,) in segments(self.state).items():
            if owners:
                rank = min(owners, key=lambda owner: (load[owner], owner))
                load[rank] += slab.elements
                found[rank].append(slab)
        return {rank: tuple(slabs) for rank, slabs in found.items()}

    def to_json(self) -> str:
        """For a newcomer, who has not been told what the others hold."""
        rows = [_rows(self.parameters), _rows(self.state)]
        return json.dumps([*rows, dict(self.groups), self.redundancy, dict(self.nodes)])

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Inverse of :meth:`to_json`."""
        parameters, state, groups, redundancy, nodes = json.loads(text)
        found = cls(
            parameters=_slabs(parameters),
            groups=groups,
            redundancy=redundancy,
            nodes={int(rank): node for rank, node in nodes.items()},
        )
        vars(found)["state"] = _slabs(state)
        return found

    @cached_property
    def state(self) -> Holdings:
        """Whose optimizer state is where: masters and moments."""
        kept: dict[int, list[Slab]] = {rank: [] for rank in self.parameters}
        for one in self.keepers:
            for member in one.members:
                kept[member] += one.kept(member)
        return kept


def _rows(held: Holdings) -> dict[int, list[list[Any]]]:
    return {
        rank: [[one.tensor, one.low, one.high] for one in slabs] for rank, slabs in held.items()
    }


def _slabs(rows: Mapping[str, list[list[Any]]]) -> dict[int, tuple[Slab, ...]]:
    return {
        int(rank): tuple(
            Slab(tensor=name, low=tuple(low), high=tuple(high)) for name, low, high in held
        )
        for rank, held in rows.items()
    }


def _by_layer(slab: Slab) -> Iterator[Slab]:
    """Cuts a slab of a tensor that stacks the matrices of all layers, as checkpoints do."""
    if len(slab.shape) < 3:
        yield slab
        return
    for layer in range(slab.low[0], slab.high[0]):
        yield slab.cut(0, layer, layer + 1)
