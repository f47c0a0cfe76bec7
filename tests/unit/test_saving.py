"""Saves that fail: on all ranks, on one, before anything is written; and what comes next."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint import CheckpointException

from megatron.resilience.executor.guard import Figures, NoGuard, SpoiledError
from megatron.resilience.executor.saving import Saving, why_not_writable

pytestmark = pytest.mark.unit


class Again(NoGuard):
    """Attempts a stretch a second time when it was spoiled, as the recovery does."""

    def run(self, phase: str, attempt: Callable[[], Figures], **_options: object) -> Figures:
        try:
            return attempt()
        except SpoiledError:
            return attempt()


class Saves:
    """What is to be saved; fails as it is told to, one failure a call."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = list(failures)
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture
def saving() -> Iterator[Saving]:
    """Of a world of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Saving(torch.device("cpu"))
    dist.destroy_process_group()


def full() -> OSError:
    return OSError(28, "No space left on device")


def test_what_all_ranks_raise_together_is_one_line(
    saving: Saving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = CheckpointException("write", {3: (full(), None)})  # type: ignore[dict-item]
    saving.run(NoGuard(), Saves(error), step=4, directory=str(tmp_path))
    assert saving.failed is not None
    assert saving.failed.step == 4
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("resihp: step 4: the checkpoint could not be saved: rank 3: [Errno 28]")
    saving.run(NoGuard(), Saves(), step=6, directory=str(tmp_path))
    assert saving.failed is None, "the next one is there"
    assert not capsys.readouterr().out


def test_what_one_rank_raises_breaks_off_the_others_and_is_not_tried_again(
    saving: Saving, tmp_path: Path
) -> None:
    saves = Saves(full())
    with pytest.raises(SpoiledError, match=r"step 4: .*No space left"):
        saving.run(NoGuard(), saves, step=4, directory=str(tmp_path))
    saves = Saves(full())
    saving.run(Again(), saves, step=4, directory=str(tmp_path))
    assert saves.calls == 1
    assert saving.failed is not None
    saving.run(Again(), saves, step=6, directory=str(tmp_path))
    assert (saves.calls, saving.failed) == (2, None)


@pytest.mark.parametrize("error", [ConnectionResetError("peer"), RuntimeError("gloo"), KeyError(1)])
def test_other_errors_are_none_of_the_disks(
    saving: Saving, tmp_path: Path, error: Exception
) -> None:
    with pytest.raises(type(error)):
        saving.run(Again(), Saves(error), step=4, directory=str(tmp_path))


def test_where_nothing_can_be_written_nothing_is_begun(
    saving: Saving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    saves, directory = Saves(), str(tmp_path / "file" / "checkpoints")
    saving.run(NoGuard(), saves, step=4, directory=directory)
    assert saves.calls == 0
    assert f"could not be saved: {directory}: Not a directory;" in capsys.readouterr().out


def test_the_look_at_the_directory_leaves_nothing_behind(tmp_path: Path) -> None:
    assert why_not_writable(str(tmp_path / "new")) == ""
    assert list((tmp_path / "new").iterdir()) == []
    assert why_not_writable("msc://bucket/job") == "", "not a path here"


def test_results_of_an_attempt_that_was_broken_off_are_dropped(
    saving: Saving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: queue.Queue[str] = queue.Queue()
    results.put("of ranks that are gone")
    monkeypatch.setattr(filesystem_async, "_results_queue", results)
    found: list[int] = []
    saving.run(NoGuard(), lambda: found.append(results.qsize()), step=4, directory=str(tmp_path))
    assert found == [0]
