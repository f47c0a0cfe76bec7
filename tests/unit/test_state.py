"""Slabs, sync domains and transfers, against counting every element by hand."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import plans

from resihp_ext.plan.plan import Plan
from resihp_ext.state.domains import SyncDomain, require_complete, sync_domains
from resihp_ext.state.slab import Holdings, Slab, StateError, segments
from resihp_ext.state.transfer import plan_transfers

pytestmark = pytest.mark.unit

Element = tuple[str, tuple[int, ...]]


def elements(slab: Slab) -> set[Element]:
    ranges = (range(low, high) for low, high in zip(slab.low, slab.high, strict=True))
    return {(slab.tensor, place) for place in product(*ranges)}


def elements_of(holdings: Holdings) -> dict[int, set[Element]]:
    return {rank: {e for slab in slabs for e in elements(slab)} for rank, slabs in holdings.items()}


names = st.sampled_from(["a", "b", "c"])
AXES = {"a": (), "b": (9,), "c": (6, 5)}
"""Shapes of the logical tensors: a scalar, a vector and a matrix."""


@st.composite
def slabs(draw: st.DrawFn) -> Slab:
    tensor = draw(names)
    bounds = []
    for size in AXES[tensor]:
        low = draw(st.integers(0, size - 1))
        bounds.append((low, draw(st.integers(low + 1, size))))
    return Slab(tensor=tensor, low=tuple(b[0] for b in bounds), high=tuple(b[1] for b in bounds))


def holdings_of(ranks: st.SearchStrategy[int]) -> st.SearchStrategy[Holdings]:
    return st.dictionaries(ranks, st.lists(slabs(), max_size=4), min_size=1, max_size=5)


def whole() -> list[Slab]:
    return [Slab.whole(name, shape) for name, shape in AXES.items()]


def check_domains(holdings: Holdings) -> None:
    held = elements_of(holdings)
    domains = sync_domains(holdings)
    seen = Counter(e for domain in domains for slab in domain.slabs for e in elements(slab))
    assert set(seen) == set().union(*held.values()), "domains cover what is held"
    assert max(seen.values(), default=1) == 1, "domains are disjoint"
    for domain in domains:
        assert domain.elements == sum(len(elements(slab)) for slab in domain.slabs)
        for slab in domain.slabs:
            for element in elements(slab):
                owners = tuple(rank for rank in sorted(held) if element in held[rank])
                assert owners == domain.owners
    assert len({domain.owners for domain in domains}) == len(domains), "one buffer a set of owners"
    assert list(domains) == sorted(domains)
    mixed = dict(reversed(holdings.items()))
    assert sync_domains(mixed) == domains, "the order in which ranks are named does not matter"


def check_transfers(held: Holdings, needed: Holdings) -> None:
    have, want = elements_of(held), elements_of(needed)
    got: Counter[tuple[int, Element]] = Counter()
    for transfer in plan_transfers(held, needed):
        assert elements(transfer.slab) <= have[transfer.source], "from a holder"
        got.update((transfer.destination, element) for element in elements(transfer.slab))
    lacking = {(rank, e) for rank in want for e in want[rank] - have.get(rank, set())}
    assert set(got) == lacking, "all that is lacking, and nothing else"
    assert max(got.values(), default=1) == 1, "once"


@given(holdings=holdings_of(st.integers(0, 9)))
def test_domains_hold_each_element_once_with_all_its_owners(holdings: Holdings) -> None:
    check_domains(holdings)


@given(
    held=holdings_of(st.integers(0, 5)),
    needed=holdings_of(st.integers(0, 6)),
    source=st.integers(0, 5),
)
def test_transfers_bring_what_is_lacking_once_and_nothing_else(
    held: Holdings, needed: Holdings, source: int
) -> None:
    check_transfers({**held, source: whole()}, needed)


@given(held=holdings_of(st.integers(0, 3)), needed=holdings_of(st.integers(2, 5)))
def test_what_nobody_holds_is_never_sent(held: Holdings, needed: Holdings) -> None:
    available = set().union(*elements_of(held).values())
    if set().union(*elements_of(needed).values()) <= available:
        check_transfers(held, needed)
    else:
        with pytest.raises(StateError, match="held by none"):
            plan_transfers(held, needed)


NUM_LAYERS = 6


def state_of(plan: Plan) -> dict[int, list[Slab]]:
    """A layer has a matrix cut by rows over its ranks, and a norm that all of them hold; the first
    and the last layer's ranks share the embedding."""
    held: dict[int, list[Slab]] = {}
    for instance in plan.instances:
        stage = plan.stage(instance)
        for tp_rank, rank in enumerate(stage.ranks):
            mine = held.setdefault(rank, [])
            share = (12 * tp_rank // stage.tp, 12 * (tp_rank + 1) // stage.tp)
            for layer in range(*stage.layers):
                mine.append(rows(f"{layer}.weight", *share, columns=1))
                mine.append(Slab.whole(f"{layer}.norm", (3,)))
            if {0, plan.num_layers} & set(stage.layers):
                mine.append(rows("embedding", *share, columns=2))
    return held


@given(before=plans(num_layers=NUM_LAYERS), after=plans(num_layers=NUM_LAYERS))
@settings(max_examples=40)
def test_state_moves_from_any_plan_to_any_other(before: Plan, after: Plan) -> None:
    """Also to fewer ranks, other degrees, other layer maps, and chunks."""
    held, needed = state_of(before), state_of(after)
    shapes = {f"{layer}.weight": (12, 1) for layer in range(NUM_LAYERS)}
    shapes |= {f"{layer}.norm": (3,) for layer in range(NUM_LAYERS)} | {"embedding": (12, 2)}
    for holdings in (held, needed):
        require_complete(shapes, holdings)
        check_domains(holdings)
    check_transfers(held, needed)
    assert plan_transfers(held, held) == ()


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
