"""Shares of a sync domain's state: every element once, in order, and evenly."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from resihp_ext.state.domains import SyncDomain
from resihp_ext.state.shards import shares
from resihp_ext.state.slab import Slab

pytestmark = pytest.mark.unit

SEEDS = range(100)


def sequence(slabs: tuple[Slab, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """Elements as they follow each other in a flat buffer of these slabs."""
    return [
        (slab.tensor, place)
        for slab in slabs
        for place in product(
            *(range(low, high) for low, high in zip(slab.low, slab.high, strict=True))
        )
    ]


def row_elements(slab: Slab) -> int:
    """Elements behind one step along the first axis that has several."""
    longest = next((size for size in slab.shape if size > 1), 1)
    return slab.elements // longest


def random_domain(random: Random) -> SyncDomain:
    slabs = []
    for number in range(random.randint(1, 5)):
        axes = random.randint(0, 3)
        low = tuple(random.choice([0, 0, 3]) for _ in range(axes))
        high = tuple(a + random.choice([1, 1, 2, 5, 9]) for a in low)
        slabs.append(Slab(tensor=f"w{number}", low=low, high=high))
    owners = random.sample(range(12), random.randint(1, 8))
    return SyncDomain(owners=tuple(sorted(owners)), slabs=tuple(slabs))


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_follow_each_other_and_are_the_domain(seed: int) -> None:
    domain = random_domain(Random(seed))
    found = shares(domain)
    assert tuple(found) == domain.owners
    joined = tuple(slab for slabs in found.values() for slab in slabs)
    assert sequence(joined) == sequence(domain.slabs)


@pytest.mark.parametrize("seed", SEEDS)
def test_shares_are_even_to_a_row(seed: int) -> None:
    domain = random_domain(Random(seed))
    ideal = domain.elements / len(domain.owners)
    row = max(map(row_elements, domain.slabs))
    for slabs in shares(domain).values():
        # Each end of a share lies within half a row, and a rounded element, of its ideal place.
        assert abs(sum(slab.elements for slab in slabs) - ideal) < row + 1


def test_rows_of_a_matrix_are_not_cut() -> None:
    matrix = Slab.whole("w", (10, 7))
    cut = shares(SyncDomain(owners=(2, 5, 6), slabs=(matrix,)))
    assert cut == {
        2: (matrix.cut(0, 0, 3),),
        5: (matrix.cut(0, 3, 7),),
        6: (matrix.cut(0, 7, 10),),
    }


def test_a_share_goes_on_in_the_next_tensor() -> None:
    norm, matrix = Slab.whole("norm", (4,)), Slab.whole("w", (8, 2))
    assert shares(SyncDomain(owners=(0, 1), slabs=(norm, matrix))) == {
        0: (norm, matrix.cut(0, 0, 3)),
        1: (matrix.cut(0, 3, 8),),
    }


def test_leading_axes_of_one_element_are_skipped() -> None:
    """A layer's slab of a tensor that stacks layers is cut along its own rows."""
    layer = Slab(tensor="w", low=(3, 0, 0), high=(4, 6, 2))
    found = shares(SyncDomain(owners=(0, 1, 2), slabs=(layer,)))
    assert [slabs[0].shape for slabs in found.values()] == [(1, 2, 2)] * 3


def test_more_owners_than_elements() -> None:
    scalar = Slab.whole("scale", ())
    found = shares(SyncDomain(owners=(0, 1, 2), slabs=(scalar,)))
    assert sorted(map(len, found.values())) == [0, 0, 1]


def test_one_owner_keeps_everything_as_it_is() -> None:
    slabs = (Slab.whole("a", (3, 2)), Slab.whole("b", ()))
    assert shares(SyncDomain(owners=(4,), slabs=slabs)) == {4: slabs}
