"""Who keeps optimizer state, and where its second copy is: whole, apart, the same everywhere."""

from random import Random

import pytest

from resihp_ext.state.domains import SyncDomain
from resihp_ext.state.keepers import Keepers, Redundancy, keepers
from resihp_ext.state.shards import shares
from resihp_ext.state.slab import Slab, segments

pytestmark = pytest.mark.unit

SEEDS = range(60)


def domains_of(seed: int, ranks: int) -> tuple[SyncDomain, ...]:
    """Disjoint domains over random owners, some with just one."""
    random = Random(seed)
    found = []
    for number in range(random.randint(1, 6)):
        owners = tuple(sorted(random.sample(range(ranks), random.randint(1, ranks))))
        slabs = tuple(
            Slab(
                tensor=f"t{number}.{k}",
                low=(0, 0),
                high=(random.randint(1, 7), random.randint(1, 5)),
            )
            for k in range(random.randint(1, 3))
        )
        found.append(SyncDomain(owners=owners, slabs=slabs))
    return tuple(found)


def holders(domain: SyncDomain, one: Keepers) -> dict[Slab, frozenset[int]]:
    """Which ranks keep which part of a domain."""
    held = {rank: one.kept(rank) for rank in one.members}
    return {slab: ranks for slab, (ranks,) in segments(held).items()}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("redundancy", ["replicated", "buddy", "checkpoint"])
def test_every_element_is_kept(seed: int, redundancy: Redundancy) -> None:
    domains = domains_of(seed, ranks=6)
    nodes = {rank: rank // 2 for rank in range(6)}
    for domain, one in zip(domains, keepers(domains, redundancy, nodes), strict=True):
        found = holders(domain, one)
        assert sum(slab.elements for slab in found) == domain.elements
        copies = {len(ranks) for ranks in found.values()}
        assert (
            copies
            == {
                "replicated": {len(domain.owners)},
                "buddy": {2},
                "checkpoint": {1},
            }[redundancy]
        )
        assert set(domain.owners) <= set(one.members)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_buddy_is_on_another_node_where_an_owner_is(seed: int) -> None:
    domains = domains_of(seed, ranks=6)
    nodes = {rank: rank // 2 for rank in range(6)}
    for domain, one in zip(domains, keepers(domains, "buddy", nodes), strict=True):
        apart = len(domain.owners) == 1 or len({nodes[rank] for rank in domain.owners}) > 1
        for ranks in holders(domain, one).values():
            assert len({nodes[rank] for rank in ranks}) == (2 if apart else 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_own_shares_come_first_and_follow_each_other(seed: int) -> None:
    domains = domains_of(seed, ranks=5)
    nodes = dict.fromkeys(range(5), 0)
    for domain, one in zip(domains, keepers(domains, "buddy", nodes), strict=True):
        cut = shares(domain)
        for owner in domain.owners:
            assert one.kept(owner)[: len(cut[owner])] == cut[owner]


def test_guests_are_spread() -> None:
    slab = Slab(tensor="t", low=(0,), high=(8,))
    domains = tuple(
        SyncDomain(owners=(0,), slabs=(Slab(tensor=f"{slab.tensor}{k}", low=(0,), high=(8,)),))
        for k in range(4)
    )
    nodes = {0: 0, 1: 0, 2: 1, 3: 1}
    guests = [set(one.members) - {0} for one in keepers(domains, "buddy", nodes)]
    assert guests == [{2}, {3}, {2}, {3}]


def test_a_lone_rank_has_no_buddy() -> None:
    domain = SyncDomain(owners=(0,), slabs=(Slab(tensor="t", low=(0,), high=(8,)),))
    (one,) = keepers([domain], "buddy", {0: 0})
    assert one.members == (0,)
    assert one.kept(0) == domain.slabs
