"""The flat buffers of one sync domain on one of its members: gradients, optimizer state, and the
way between them and the parameters of the modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron.resilience.executor.manifest import Piece
from megatron.resilience.executor.parts import Part, in_one_piece, parts
from resihp_ext.state.domains import SyncDomain
from resihp_ext.state.keepers import Keepers
from resihp_ext.state.shards import shares
from resihp_ext.state.slab import Slab

MASTER = "master"
"""The fp32 weights, among the kinds of state."""


@dataclass(frozen=True, slots=True)
class Section:
    """Neighbours in a domain's buffer, of one parameter group, whose state this rank keeps."""

    group: int
    low: int
    """First element in the domain's buffer."""
    at: int
    """First element in what this rank keeps."""
    elements: int


class DomainBuffer:
    """One member's side of a sync domain.

    Attributes:
        gradient: All elements of the domain, fp32; after :meth:`reduce` the same on all members.
        state: What this rank keeps, flat and fp32, by kind: ``master``, the weights, and the
            optimizer's moments of them. What is its own comes first, then what it keeps for others.
    """

    def __init__(
        self,
        domain: SyncDomain,
        keepers: Keepers,
        *,
        rank: int,
        group: Any,
        pieces: Sequence[Piece],
        kinds: Sequence[str],
        device: torch.device,
    ) -> None:
        """Lays out the buffers.

        Args:
            group: The process group of the keepers.
            pieces: What this rank's modules hold.
            kinds: The optimizer's moments of a weight.
        """
        self.domain = domain
        self.keepers = keepers
        self._group = group
        self._rank = rank
        self._guest = rank not in domain.owners
        self.gradient = torch.zeros(domain.elements, dtype=torch.float32, device=device)
        self.kept = keepers.kept(rank)
        self.own = sum(slab.elements for slab in keepers.own.get(rank, ()))
        elements = sum(slab.elements for slab in self.kept)
        self.state = {
            # Zeros that are written, or else the system hands out pages while state moves here.
            kind: torch.empty(elements, dtype=torch.float32, device=device).zero_()
            for kind in (MASTER, *kinds)
        }
        self._pieces = pieces
        self._copied = list(parts(self.gradient, domain.slabs, pieces, _gradient_of))
        self._shared: list[Part] = []
        self._masters = list(parts(self.state[MASTER], self.kept, pieces, _weight_of))
        mine = shares(domain).get(rank, ())
        low = _place(mine[0], domain.slabs) if mine else 0
        self._counted = slice(low, low + sum(slab.elements for slab in mine))

    def entries(self, kind: str) -> Iterator[tuple[Slab, torch.Tensor]]:
        """Every slab that this rank keeps, with its state in the slab's shape."""
        low = 0
        for slab in self.kept:
            yield slab, self.state[kind][low : low + slab.elements].view(slab.shape)
            low += slab.elements

    @property
    def whole(self) -> bool:
        """Whether this rank alone keeps the state of the whole domain, if it owns the domain."""
        return self.own == self.domain.elements

    @torch.no_grad()
    def share_memory(self) -> list[torch.nn.Parameter]:
        """Lets modules keep gradients, and fp32 weights, in these buffers wherever a parameter
        lies in one of them as it lies in the module: nothing has to be copied then.

        Returns:
            The parameters whose gradients are here now.
        """
        views = in_one_piece(self.gradient, self._copied)
        views = {part: view for part, view in views.items() if part.local.dtype == view.dtype}
        for part, view in views.items():
            part.parameter.main_grad = view  # type: ignore[attr-defined]
        self._shared = list(views)
        self._copied = [part for part in self._copied if part not in views]
        masters = in_one_piece(self.state[MASTER], self._masters) if self.whole else {}
        masters = {part: view for part, view in masters.items() if part.local.dtype == view.dtype}
        for part in masters:
            part.flat.copy_(part.local)
        for part, view in masters.items():
            part.parameter.data = view
        self._masters = [part for part in self._masters if part not in masters]
        return [part.parameter for part in self._shared]

    def clear_gradients(self) -> None:
        """Before a step: what modules add to starts at 0."""
        if self._shared or self._guest:
            self.gradient.zero_()
        for part in self._copied:
            # Upstream clears its own buffers, which may be gone.
            part.local.zero_()

    @torch.no_grad()
    def pack_gradients(self) -> None:
        """Collects this rank's contribution from the modules' gradients.

        What is replicated inside a stage is divided by the number of its copies, so that the sum
        over all owners counts every stage instance once; partial sums are not.
        """
        for part in self._shared:
            if part.copies > 1:
                part.flat.mul_(1 / part.copies)
        for part in self._copied:
            if part.again:
                part.flat.add_(part.local, alpha=1 / part.copies)
            elif part.copies == 1:
                part.flat.copy_(part.local)
            else:
                torch.mul(part.local, 1 / part.copies, out=part.flat)

    def reduce(self) -> Any:
        """Starts the sum over all members; None where there is nobody else."""
        if len(self.keepers.members) == 1:
            return None
        return dist.all_reduce(self.gradient, group=self._group, async_op=True)

    def square_sum(self) -> torch.Tensor:
        """This owner's share of the squared gradient norm, fp64; shares are disjoint."""
        mine = self.gradient[self._counted]
        return torch.linalg.vector_norm(mine, dtype=torch.float64) ** 2

    def zeros(self) -> torch.Tensor:
        """This owner's share of the number of gradient elements that are 0."""
        mine = self.gradient[self._counted]
        return (mine == 0).sum().double()

    def sections(self, groups: Mapping[str, int]) -> list[Section]:
        """Cuts what this rank keeps where it does not follow on in the domain, and by group.

        Args:
            groups: Parameter group of each tensor.
        """
        found: list[Section] = []
        at = 0
        for slab in self.kept:
            low, group = _place(slab, self.domain.slabs), groups[slab.tensor]
            last = found[-1] if found else None
            if last and last.group == group and last.low + last.elements == low:
                found[-1] = Section(group, last.low, last.at, last.elements + slab.elements)
            else:
                found.append(Section(group, low, at, slab.elements))
            at += slab.elements
        return found

    @torch.no_grad()
    def masters_from_parameters(self) -> None:
        """Takes the modules' weights as the masters."""
        for part in self._masters:
            part.flat.copy_(part.local)

    @torch.no_grad()
    def parameters_from_masters(self) -> None:
        """Writes the weights into the modules, rounded to their type; collective over the owners
        when they share the state."""
        if self._guest:
            return
        if self.whole:
            written = self._masters
        else:
            flat = self.gathered(MASTER, self._dtype())
            written = list(parts(flat, self.domain.slabs, self._pieces, _weight_of))
        if written:
            torch._foreach_copy_([part.local for part in written], [part.flat for part in written])

    def _dtype(self) -> torch.dtype:
        kinds = {piece.parameter.dtype for piece in self._pieces}
        return kinds.pop() if len(kinds) == 1 else torch.float32

    def gathered(self, kind: str, dtype: torch.dtype) -> torch.Tensor:
        """State of the whole domain from all owners' shares; collective when they share it."""
        mine = self.state[kind]
        if self.whole or self._guest:
            return mine.to(dtype)
        own = self.keepers.own
        sizes = [sum(slab.elements for slab in own[owner]) for owner in self.domain.owners]
        most = max(sizes)
        padded = torch.zeros(most, dtype=dtype, device=mine.device)
        padded[: self.own] = mine[: self.own]
        every = torch.empty(most * len(sizes), dtype=dtype, device=mine.device)
        dist.all_gather_into_tensor(every, padded, group=self._group)
        return torch.cat([every[k * most : k * most + size] for k, size in enumerate(sizes)])

    def tell_guest(self) -> None:
        """Gives a guest the state that the owner has loaded; collective over the members."""
        if len(self.keepers.members) > len(self.domain.owners):
            for state in self.state.values():
                owner = self.keepers.members.index(self.domain.owners[0])
                dist.broadcast(state, group=self._group, group_src=owner)


def _gradient_of(piece: Piece) -> torch.Tensor:
    gradient: torch.Tensor = piece.parameter.main_grad  # type: ignore[attr-defined]
    return gradient


def _weight_of(piece: Piece) -> torch.Tensor:
    return piece.parameter.data


def _place(inner: Slab, slabs: Sequence[Slab]) -> int:
    """Where a slab cut along its first long axis begins in the domain's buffer."""
    start = 0
    for slab in slabs:
        if inner.intersection(slab) == inner:
            before = 0
            for a, base, high in zip(inner.low, slab.low, slab.high, strict=True):
                before = before * (high - base) + (a - base)
            return start + before
        start += slab.elements
    raise KeyError(str(inner))
