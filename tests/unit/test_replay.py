"""What a rank remembers of past steps."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.resilience.executor.player import Pass
from megatron.resilience.executor.replay import History

pytestmark = pytest.mark.unit

MICRO_BATCHES, SIZE = 4, 2
BATCH = MICRO_BATCHES * SIZE


def work(position: int) -> Pass:
    nothing: Any = None
    return Pass(
        forward_step_func=nothing,
        stream=nothing,
        position=position,
        micro_batches=MICRO_BATCHES,
        seq_length=8,
        micro_batch_size=SIZE,
        forward_only=False,
        collect_non_loss_data=False,
    )


def history(first: int, end: int, *, iterations_ahead: int = 0) -> History:
    """Of a rank that has begun the steps after ``first`` to ``end - 1`` updates."""
    found = History()
    for updates in range(first, end):
        step = updates + iterations_ahead
        found.record(updates, step, work(step * BATCH), [{"lr": 0.1 * updates}])
    return found


def test_a_rank_that_came_later_learns_from_one_that_was_there() -> None:
    old, new = history(0, 6), history(4, 6)
    assert old.knows(2, 6)
    assert not new.knows(2, 6)
    new.take(2, old.told(2, 6))
    assert new.knows(2, 6)
    assert [new.find(updates) for updates in range(2, 6)] == [
        old.find(updates) for updates in range(2, 6)
    ]
    assert not new.knows(1, 6)


def test_what_a_state_has_behind_it() -> None:
    one = history(3, 6, iterations_ahead=10)
    assert one.place(5, SIZE) == (15, 15 * BATCH), "before a step that was begun"
    assert one.place(6, SIZE) == (16, 16 * BATCH), "after the last that was begun"
    assert one.place(3, SIZE) == (13, 13 * BATCH)
    assert one.place(2, SIZE) is None
    assert one.place(7, SIZE) is None
