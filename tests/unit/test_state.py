"""Slabs, sync domains and transfers, against counting every element by hand."""

from __future__ import annotations

from collections import Counter
from itertools import product
from random import Random

import pytest

from resihp_ext.state.domains import SyncDomain, require_complete, sync_domains
from resihp_ext.state.slab import Holdings, Slab, StateError, segments
from resihp_ext.state.transfer import plan_transfers

pytestmark = pytest.mark.unit

Element = tuple[str, tuple[int, ...]]
SEEDS = range(120)


def elements(slab: Slab) -> set[Element]:
    ranges = (range(low, high) for low, high in zip(slab.low, slab.high, strict=True))
    return {(slab.tensor, place) for place in product(*ranges)}


def elements_of(holdings: Holdings) -> dict[int, set[Element]]:
    return {rank: {e for slab in slabs for e in elements(slab)} for rank, slabs in holdings.items()}


def shapes_of(random: Random) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"scalar": (), "vector": (random.randint(1, 12),)}
    shapes["matrix"] = (random.randint(1, 8), random.randint(1, 8))
    shapes["cube"] = tuple(random.randint(1, 4) for _ in range(3))
    return shapes


def random_slab(random: Random, tensor: str, shape: tuple[int, ...]) -> Slab:
    bounds = [sorted(random.sample(range(size + 1), 2)) for size in shape]
    return Slab(tensor=tensor, low=tuple(b[0] for b in bounds), high=tuple(b[1] for b in bounds))


def random_holdings(random: Random, shapes: dict[str, tuple[int, ...]], ranks: int) -> Holdings:
    return {
        rank: [
            random_slab(random, *random.choice(sorted(shapes.items())))
            for _ in range(random.randint(0, 4))
        ]
        for rank in range(ranks)
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_domains_hold_each_element_once_with_all_its_owners(seed: int) -> None:
    random = Random(seed)
    holdings = random_holdings(random, shapes_of(random), random.randint(1, 6))
    held = elements_of(holdings)
    domains = sync_domains(holdings)
    seen = Counter(e for domain in domains for slab in domain.slabs for e in elements(slab))
    assert set(seen) == set().union(*held.values())
    assert max(seen.values(), default=1) == 1
    for domain in domains:
        assert domain.elements == sum(len(elements(slab)) for slab in domain.slabs)
        for slab in domain.slabs:
            for element in elements(slab):
                owners = tuple(rank for rank in sorted(held) if element in held[rank])
                assert owners == domain.owners
    assert len({domain.owners for domain in domains}) == len(domains), "one buffer a set of owners"
    assert list(domains) == sorted(domains)
    mixed = dict(random.sample(sorted(holdings.items()), len(holdings)))
    assert sync_domains(mixed) == domains, "the order in which ranks are named does not matter"


@pytest.mark.parametrize("seed", SEEDS)
def test_transfers_bring_what_is_lacking_once_and_nothing_else(seed: int) -> None:
    random = Random(seed)
    shapes, ranks = shapes_of(random), random.randint(2, 6)
    held = dict(random_holdings(random, shapes, ranks))
    held[random.randrange(ranks)] = [Slab.whole(name, shape) for name, shape in shapes.items()]
    needed = random_holdings(random, shapes, ranks + 1)
    have, want = elements_of(held), elements_of(needed)
    got: Counter[tuple[int, Element]] = Counter()
    for transfer in plan_transfers(held, needed):
        assert elements(transfer.slab) <= have[transfer.source]
        got.update((transfer.destination, element) for element in elements(transfer.slab))
    lacking = {(rank, e) for rank in want for e in want[rank] - have.get(rank, set())}
    assert set(got) == lacking
    assert max(got.values(), default=1) == 1


def rows(tensor: str, low: int, high: int, columns: int = 4) -> Slab:
    return Slab.whole(tensor, (12, columns)).cut(0, low, high)


def test_degrees_two_and_three_meet_at_the_cuts_of_both() -> None:
    holdings = {0: [rows("w", 0, 6)], 1: [rows("w", 6, 12)]}
    holdings |= {2 + i: [rows("w", 4 * i, 4 * i + 4)] for i in range(3)}
    assert sync_domains(holdings) == (
        SyncDomain(owners=(0, 2), slabs=(rows("w", 0, 4),)),
        SyncDomain(owners=(0, 3), slabs=(rows("w", 4, 6),)),
        SyncDomain(owners=(1, 3), slabs=(rows("w", 6, 8),)),
        SyncDomain(owners=(1, 4), slabs=(rows("w", 8, 12),)),
    )


def test_gate_and_up_halves_are_two_pieces_of_each_rank() -> None:
    """A GLU weight cut as one block would give rank 0 the whole gate."""
    holdings = {
        0: [rows("glu", 0, 3), rows("glu", 6, 9)],
        1: [rows("glu", 3, 6), rows("glu", 9, 12)],
        2: [rows("glu", 0, 12)],
    }
    first, second = sync_domains(holdings)
    assert first == SyncDomain(owners=(0, 2), slabs=(rows("glu", 0, 3), rows("glu", 6, 9)))
    assert second == SyncDomain(owners=(1, 2), slabs=(rows("glu", 3, 6), rows("glu", 9, 12)))


def test_what_the_same_ranks_own_shares_a_buffer_across_tensors() -> None:
    holdings = {rank: [rows("a", 0, 12), rows("b", 0, 12)] for rank in (3, 1)}
    (domain,) = sync_domains(holdings)
    assert (domain.owners, domain.elements) == ((1, 3), 96)


def test_transfers_are_spread_over_the_sources() -> None:
    held = {rank: [rows("w", 0, 12)] for rank in range(4)}
    needed = {4 + i: [rows("w", 3 * i, 3 * i + 3)] for i in range(4)}
    sources = [transfer.source for transfer in plan_transfers(held, needed)]
    assert sorted(sources) == [0, 1, 2, 3]


def test_what_is_in_place_does_not_move() -> None:
    held = {0: [rows("w", 0, 12)], 1: [rows("w", 0, 6)]}
    (transfer,) = plan_transfers(held, {0: [rows("w", 0, 6)], 1: [rows("w", 2, 12)]})
    assert (transfer.source, transfer.destination) == (0, 1)
    assert transfer.slab == rows("w", 6, 12)


def test_a_lost_piece_is_named() -> None:
    held = {0: [rows("w", 0, 6)]}
    with pytest.raises(StateError, match=r"w\[6:12, 0:4\] is needed by ranks \[1, 2\]"):
        plan_transfers(held, {rank: [rows("w", 3, 12)] for rank in (1, 2)})


def test_a_model_must_be_held_as_a_whole() -> None:
    shapes = {"w": (12, 4), "b": ()}
    whole = [Slab.whole(name, shape) for name, shape in shapes.items()]
    require_complete(shapes, {0: whole, 1: [rows("w", 3, 5)]})
    for held, words in (
        ({0: [rows("w", 0, 11), whole[1]]}, r"w: the ranks hold 44 of 48 elements"),
        ({0: whole[:1]}, r"b: the ranks hold 0 of 1 elements"),
        ({0: [*whole, Slab.whole("x", (2,))]}, r"x\[0:2\] is held, but the model has no such"),
        ({0: [*whole, rows("w", 0, 12, 5)]}, r"reaches beyond the shape \(12, 4\)"),
        ({0: [*whole, Slab.whole("w", (12,))]}, "different numbers of axes"),
    ):
        with pytest.raises(StateError, match=words):
            require_complete(shapes, held)


@pytest.mark.parametrize(
    ("low", "high"), [((0,), (0,)), ((2,), (1,)), ((-1,), (2,)), ((0, 0), (1,))]
)
def test_what_is_no_slab(low: tuple[int, ...], high: tuple[int, ...]) -> None:
    with pytest.raises(StateError, match="no slab has bounds"):
        Slab(tensor="w", low=low, high=high)


def test_neighbours_with_the_same_ranks_are_one_segment() -> None:
    quarters = [rows("w", 3 * i, 3 * i + 3) for i in range(4)]
    assert segments({0: quarters}) == {rows("w", 0, 12): (frozenset({0}),)}
