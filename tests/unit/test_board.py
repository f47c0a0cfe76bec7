"""Who writes for TensorBoard: the last member, and another one when that is lost or comes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars

from megatron.resilience.patches.tensorboard_writer import TensorboardWriter
from megatron.resilience.upstream.board import Board

pytestmark = pytest.mark.unit


class Written(list[Any]):
    """Stands for the file of one writer; TensorBoard is no dependency."""

    flushes = 0
    closed = False

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.append((tag, value, step))

    def add_text(self, tag: str, text: str, global_step: int = 0) -> None:
        self.append((tag, text, global_step))

    def flush(self) -> None:
        self.flushes += 1

    def close(self) -> None:
        self.closed = True


class Job:
    """Boards of some ranks that all see the same steps."""

    def __init__(self, *members: int) -> None:
        self.members: tuple[int, ...] = members
        self.files: list[tuple[int, Written]] = []
        self.boards: dict[int, Board] = {}
        for rank in members:
            self.add(rank)

    def add(self, rank: int) -> None:
        board = self.boards[rank] = Board(rank, lambda: self.members)

        def open_writer() -> Written:
            self.files.append((rank, Written()))
            return self.files[-1][1]

        board.open_writer = open_writer

    def step(self, number: int, *, ranks: tuple[int, ...] | None = None) -> None:
        """A step is logged, by all members or by some."""
        for rank in ranks or self.members:
            self.boards[rank].add_scalar("loss", 1 / number, number)
            self.boards[rank].add_scalar("loss vs samples", 1 / number, 8 * number)
            self.boards[rank].step_done()

    def written(self) -> list[tuple[int, list[int]]]:
        """By whom, and steps."""
        return [
            (rank, [step for tag, _, step in file if tag == "loss"]) for rank, file in self.files
        ]


def test_only_the_last_member_writes_and_each_step_is_on_disk_when_it_is_over() -> None:
    job = Job(0, 1, 2)
    for step in (1, 2):
        job.step(step)
        assert job.files[0][1].flushes == step
    assert job.written() == [(2, [1, 2])]


@pytest.mark.parametrize("had_written", [True, False])
def test_another_one_takes_over_from_a_lost_writer(had_written: bool) -> None:
    job = Job(0, 1, 2)
    job.step(1)
    job.step(2, ranks=(0, 1, 2) if had_written else (0, 1))
    job.members = (0, 1)
    job.step(3)
    job.step(4)
    mine = [1, 2] if had_written else [1]
    assert job.written() == [(2, mine), (1, [2, 3, 4])], "the step of the loss is never missing"


def test_a_newcomer_at_the_end_takes_over_and_nothing_is_written_twice() -> None:
    job = Job(0, 1)
    job.step(1)
    job.add(3)
    job.members = (0, 1, 3)
    job.step(2)
    assert job.written() == [(1, [1]), (3, [2])]
    assert job.files[0][1].closed
    job.members = (0, 1)  # it is drained
    job.step(3)
    job.boards[1].close()
    assert job.written()[-1] == (1, [2, 3])
    assert job.files[-1][1].closed


def test_who_prepares_alone_writes_nothing() -> None:
    job = Job(3)
    job.members = ()
    job.boards[3].add_text("args", "of this process")
    job.boards[3].flush()
    job.boards[3].step_done()
    assert job.files == []


def test_a_missing_tensorboard_is_said_once() -> None:
    board, asked = Board(0, lambda: (0,)), []
    board.open_writer = lambda: asked.append(0)
    for step in (1, 2):
        board.add_scalar("loss", 1.0, step)
        board.step_done()
    assert asked == [0]


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> Iterator[TensorboardWriter]:
    """Upstream with a writer to import."""
    module = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = lambda **_how: Written()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(global_vars, "_GLOBAL_TENSORBOARD_WRITER", None)
    made = TensorboardWriter()
    made.apply()
    yield made
    made.undo()


def test_upstream_gets_the_board_on_every_rank(patch: TensorboardWriter) -> None:
    patch.board = board = Board(0, lambda: (0,))
    args = SimpleNamespace(rank=0, world_size=4, tensorboard_dir="tb", tensorboard_queue_size=5)
    global_vars._set_tensorboard_writer(args)
    args.world_size = 8  # once all are connected
    assert global_vars.get_tensorboard_writer() is board
    board.add_scalar("loss", 1.0, 1)
    assert isinstance(board._real, Written)
    assert list(board._real) == [("loss", 1.0, 1)]
    assert (args.rank, global_vars.get_tensorboard_writer()) == (0, board)


def test_without_a_directory_there_is_no_writer(patch: TensorboardWriter) -> None:
    patch.board = Board(0, lambda: (0,))
    args = SimpleNamespace(rank=0, world_size=1, tensorboard_dir=None)
    global_vars._set_tensorboard_writer(args)
    assert global_vars.get_tensorboard_writer() is None


def test_without_a_board_upstream_decides(patch: TensorboardWriter) -> None:
    args = SimpleNamespace(rank=3, world_size=4, tensorboard_dir="tb", tensorboard_queue_size=5)
    global_vars._set_tensorboard_writer(args)
    assert isinstance(global_vars.get_tensorboard_writer(), Written)
