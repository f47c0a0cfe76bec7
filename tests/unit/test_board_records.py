"""Scalars that are added to TensorBoard; a list stands for its file, it is no dependency."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.resilience.board_records import BoardRecords, shares_s
from megatron.resilience.recovery.journal import Journal
from megatron.resilience.timing.clock import StepClock
from megatron.resilience.upstream.board import Board
from resihp_ext.detector.timed import RankStep, TimedAction
from resihp_ext.plan.action import Kind

pytestmark = pytest.mark.unit


class Written(list[tuple[str, float, int]]):
    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.append((tag, value, step))

    def flush(self) -> None: ...


def args(folder: str | None = "tb", every: int = 1) -> Any:
    return SimpleNamespace(tensorboard_dir=folder, tensorboard_log_interval=every)


def executor() -> Any:
    world = SimpleNamespace(epoch=2, members=(0, 1, 3))
    return SimpleNamespace(world=world, clock=StepClock(0))


def board() -> tuple[Board, Written]:
    made, file = Board(0, lambda: (0,)), Written()
    made.open_writer = lambda: file
    return made, file


def test_members_and_a_recovery_that_is_over(tmp_path: Any) -> None:
    made, file = board()
    records = BoardRecords(made, args(), executor())
    journal = Journal(tmp_path, None, 0)
    journal.recovered_s = 1.5

    def taken() -> float | None:
        found, journal.recovered_s = journal.recovered_s, None
        return found

    survivor: Any = SimpleNamespace(recovery=SimpleNamespace(recovered_s=taken))
    for step in (6, 7):
        records.done(step, survivor)
    assert file == [
        ("resihp/epoch", 2, 6),
        ("resihp/ranks", 3, 6),
        ("resihp/recovery_s", 1.5, 6),
        ("resihp/epoch", 2, 7),
        ("resihp/ranks", 3, 7),
    ]


def test_where_the_time_of_a_step_went() -> None:
    made, file = board()
    runs = executor()
    records = BoardRecords(made, args(every=2), runs)
    for step in (1, 2):
        runs.clock.restart(step, 0)
        runs.clock.begin(Kind.SYNC)
        runs.clock.finish()
        records.done(step, None)
    assert [(tag, step) for tag, _, step in file] == [
        *((f"resihp/{name}", 2) for name in ("step_s", "own_s", "wait_s", "bubble_s")),
        *(("resihp/epoch", 2), ("resihp/ranks", 2)),
    ]


def test_shares_are_told_apart_by_what_is_waited_for() -> None:
    actions = (
        TimedAction(Kind.RECV_FORWARD, 0, 0, 0.0, 0.0, 0.25),
        TimedAction(Kind.FORWARD, 0, 0, 0.25, 0.5, 0.125),
        TimedAction(Kind.SYNC, -1, 0, 0.875, 0.0, 0.0625),
    )
    step = RankStep(0, 1, 0, 0.0, 1.0, actions, ())
    assert shares_s(step) == {"step_s": 1.0, "own_s": 0.5, "wait_s": 0.1875, "bubble_s": 0.25}


@pytest.mark.parametrize("folder", [None, ""])
def test_without_a_directory_nobody_asks_the_clock(folder: str | None) -> None:
    runs, (made, file) = executor(), board()
    records = BoardRecords(made, args(folder), runs)
    records.done(1, None)
    assert (runs.clock.on_step, file) == ([], [])
    BoardRecords(None, args(), None).done(1, None)
