"""Who keeps which part of the optimizer's state, and where its second copy is.

Three choices. ``replicated``: every owner of a weight keeps its state. ``checkpoint``: each owner
of a domain keeps a share of it (ZeRO-1 on sync domains); what a lost rank kept alone comes from a
checkpoint. ``buddy``: a share is also kept by a buddy, on another node if there is one. A buddy
costs no message: all owners hold the reduced gradient and can compute the same update. A domain
with just one owner gets a guest: a rank that takes part in its reduction, adds nothing and keeps
the state of weights that it does not hold.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from resihp_ext.state.domains import SyncDomain
from resihp_ext.state.shards import shares
from resihp_ext.state.slab import Slab

Redundancy = Literal["replicated", "buddy", "checkpoint"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Keepers:
    """The ranks that reduce one domain together, and what each keeps of its state."""

    members: tuple[int, ...]
    """Owners and guest, ascending."""
    own: Mapping[int, tuple[Slab, ...]]
    """What each member keeps first of all: its share, or everything."""
    spare: Mapping[int, tuple[Slab, ...]]
    """What it keeps for another one as well."""

    def kept(self, rank: int) -> tuple[Slab, ...]:
        """Everything that a rank keeps; its own comes first."""
        return (*self.own.get(rank, ()), *self.spare.get(rank, ()))


def keepers(
    domains: Sequence[SyncDomain], redundancy: Redundancy, nodes: Mapping[int, int]
) -> tuple[Keepers, ...]:
    """Chooses keepers for every domain.

    Args:
        nodes: Node of every live rank.

    Returns:
        Keepers in the order of the domains, the same on every rank.
    """
    if redundancy == "replicated":
        return tuple(
            Keepers(
                members=domain.owners,
                own=dict.fromkeys(domain.owners, domain.slabs),
                spare={},
            )
            for domain in domains
        )
    load = dict.fromkeys(sorted(nodes), 0)
    return tuple(
        _sharded(domain, nodes, load if redundancy == "buddy" else None) for domain in domains
    )


def _sharded(domain: SyncDomain, nodes: Mapping[int, int], load: dict[int, int] | None) -> Keepers:
    """Shares of a domain; with ``load``, the elements that ranks keep as guests, also buddies."""
    cut = shares(domain)
    owners = domain.owners
    if load is None or len(nodes) == 1:
        return Keepers(members=owners, own=cut, spare={})
    if len(owners) == 1:
        (owner,) = owners
        guest = min(
            (rank for rank in load if rank != owner),
            key=lambda rank: (nodes[rank] == nodes[owner], load[rank], rank),
        )
        load[guest] += domain.elements
        return Keepers(members=tuple(sorted((owner, guest))), own=cut, spare={guest: domain.slabs})
    spare: dict[int, tuple[Slab, ...]] = {}
    for place, owner in enumerate(owners):
        ring = owners[place + 1 :] + owners[:place]
        # As even as can be: the next one in the ring, unless it shares the node.
        buddy = min(
            ring,
            key=lambda rank: (nodes[rank] == nodes[owner], rank in spare, ring.index(rank)),
        )
        spare[buddy] = (*spare.get(buddy, ()), *cut[owner])
    return Keepers(members=owners, own=cut, spare=spare)
