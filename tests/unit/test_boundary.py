"""How activations between two stages are cut, against asking for every row who answers for it."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from resihp_ext.plan.boundary import Piece, pieces, share

pytestmark = pytest.mark.unit

DEGREES = range(1, 9)
SIZES = [(rows, a, b) for rows, a, b in product(range(1, 33), DEGREES, DEGREES)]
DIVIDING = [(rows, a, b) for rows, a, b in SIZES if max(a, b) % min(a, b) == 0]


def answers_for(row: int, rows: int, degree: int) -> int:
    """The one tensor-parallel rank whose share has the row."""
    (found,) = [
        k for k in range(degree) if share(rows, degree, k)[0] <= row < share(rows, degree, k)[1]
    ]
    return found


def test_shares_cover_all_rows_in_order_and_differ_by_one_row() -> None:
    for rows, degree in product(range(1, 33), DEGREES):
        spans = [share(rows, degree, k) for k in range(degree)]
        assert spans[0][0] == 0
        assert spans[-1][1] == rows
        assert all(a[1] == b[0] for a, b in pairwise(spans))
        sizes = {high - low for low, high in spans}
        assert sizes <= {rows // degree, -(-rows // degree)}


def test_every_row_crosses_once_between_the_ranks_that_answer_for_it() -> None:
    for rows, senders, receivers in SIZES:
        found = [(row, p) for p in pieces(rows, senders, receivers) for row in range(p.low, p.high)]
        assert [row for row, _ in found] == list(range(rows)), "once, in ascending order"
        for row, piece in found:
            assert piece.sender == answers_for(row, rows, senders)
            assert piece.receiver == answers_for(row, rows, receivers)


def test_no_piece_is_empty_and_no_pair_has_two() -> None:
    for rows, senders, receivers in SIZES:
        found = pieces(rows, senders, receivers)
        assert all(piece.low < piece.high for piece in found)
        assert len({(piece.sender, piece.receiver) for piece in found}) == len(found)
        assert len(found) < senders + receivers, "no more cuts than the edges of both"


def test_degrees_that_divide_each_other_give_the_chunks_of_the_larger() -> None:
    for rows, senders, receivers in DIVIDING:
        chunks = max(senders, receivers)
        wanted = [
            Piece(k * senders // chunks, k * receivers // chunks, *share(rows, chunks, k))
            for k in range(chunks)
            if share(rows, chunks, k)[0] < share(rows, chunks, k)[1]
        ]
        assert list(pieces(rows, senders, receivers)) == wanted
        if rows % chunks == 0:
            assert {piece.high - piece.low for piece in wanted} == {rows // chunks}


def test_three_to_two() -> None:
    assert pieces(96, 3, 2) == (
        Piece(0, 0, 0, 32),
        Piece(1, 0, 32, 48),
        Piece(1, 1, 48, 64),
        Piece(2, 1, 64, 96),
    )


def test_backward_is_the_same_cut_with_the_ends_exchanged() -> None:
    for rows, senders, receivers in SIZES:
        back = [
            Piece(p.receiver, p.sender, p.low, p.high) for p in pieces(rows, receivers, senders)
        ]
        assert list(pieces(rows, senders, receivers)) == back


def test_ranks_without_rows_take_no_part() -> None:
    assert pieces(1, 1, 4) == (Piece(0, 3, 0, 1),)
    assert {piece.receiver for piece in pieces(2, 3, 4)} == {1, 3}
