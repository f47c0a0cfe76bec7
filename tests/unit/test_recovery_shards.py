"""Which checkpoint a running job takes its state from when nobody has it."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.resilience.checkpoint.metadata import METADATA_FILE
from megatron.resilience.checkpoint.verify import CONFIG_FILE
from megatron.resilience.executor.world import World
from megatron.resilience.recovery import shards
from megatron.resilience.recovery.shards import Saved, Shards, StateLostError

pytestmark = pytest.mark.unit


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> argparse.Namespace:
    found = argparse.Namespace(
        save=str(tmp_path),
        load=None,
        iteration=0,
        pretrained_checkpoint=None,
        no_save_optim=False,
        ckpt_step=None,
    )
    monkeypatch.setattr(shards, "current_args", lambda: found)
    return found


class Listed(Shards):
    """Loads nothing; says what it would load."""

    def __init__(self) -> None:
        self.optimizer = SimpleNamespace(steps=0, loaded=False)
        executor: Any = SimpleNamespace(
            world=World(members=(5,)),
            seat=SimpleNamespace(rank=5),
            device=torch.device("cpu"),
            optimizer=self.optimizer,
        )
        super().__init__(executor, level="off", initialise=lambda _models: None)
        self.taken: list[Saved] = []

    def _load(self, one: Saved, _models: list[torch.nn.Module]) -> None:
        self.taken.append(one)

    def save(self, folder: Path, step: int, *files: str) -> Path:
        """As a job does that has done as many updates as steps."""
        path = folder / f"iter_{step:07d}"
        path.mkdir()
        for name in files:
            (path / name).touch()
        self.optimizer.steps = step
        self.saved(step)
        return path


def test_the_newest_finished_save_is_taken(arguments: argparse.Namespace, tmp_path: Path) -> None:
    one = Listed()
    one.save(tmp_path, 2, METADATA_FILE, CONFIG_FILE)
    whole = one.save(tmp_path, 4, METADATA_FILE, CONFIG_FILE)
    one.save(tmp_path, 6, METADATA_FILE)
    assert one.restore([]) == (4, str(whole))
    assert [found.step for found in one.taken] == [4]


def test_what_others_have_left_in_the_folder_is_no_state_of_this_job(
    arguments: argparse.Namespace, tmp_path: Path
) -> None:
    one = Listed()
    path = tmp_path / "iter_0000009"
    path.mkdir()
    (path / METADATA_FILE).touch()
    (path / CONFIG_FILE).touch()
    with pytest.raises(StateLostError, match="this job has no checkpoint yet"):
        one.restore([])


def test_a_lost_state_names_what_is_wrong_with_the_newest_checkpoint(
    arguments: argparse.Namespace, tmp_path: Path
) -> None:
    one = Listed()
    one.save(tmp_path, 2)
    one.save(tmp_path, 4, METADATA_FILE)
    with pytest.raises(StateLostError, match=r"iter_0000004.*metadata\.json is missing"):
        one.restore([])
    assert one.taken == []


def test_a_job_that_began_with_nothing_can_begin_again(arguments: argparse.Namespace) -> None:
    one = Listed()
    one.begin()
    assert one.restore([]) == (0, "the initial weights")


@pytest.mark.parametrize(("loaded", "holds"), [(True, "all"), (False, "weights")])
def test_a_job_knows_what_it_began_with(
    arguments: argparse.Namespace, tmp_path: Path, loaded: bool, holds: str
) -> None:
    path = tmp_path / "iter_0000003"
    path.mkdir()
    for name in (METADATA_FILE, CONFIG_FILE):
        (path / name).touch()
    arguments.load, arguments.ckpt_step, arguments.iteration = str(tmp_path), 3, 3
    one = Listed()
    one.optimizer.steps, one.optimizer.loaded = (3, True) if loaded else (0, False)
    one.begin()
    assert one.restore([]) == (one.optimizer.steps, str(path))
    assert one.taken[0].holds == holds


def test_people_are_told_of_a_checkpoint_that_is_finished(
    arguments: argparse.Namespace, tmp_path: Path
) -> None:
    one = Listed()
    one.begin()
    assert one.newest == "there is no checkpoint"
    whole = one.save(tmp_path, 2, METADATA_FILE, CONFIG_FILE)
    one.save(tmp_path, 4, METADATA_FILE)
    assert one.newest == f"the newest checkpoint is {whole}"


def test_checkpoints_without_the_optimizer_do_not_count(
    arguments: argparse.Namespace, tmp_path: Path
) -> None:
    arguments.no_save_optim = True
    one = Listed()
    one.save(tmp_path, 3, METADATA_FILE, CONFIG_FILE)
    with pytest.raises(StateLostError):
        one.restore([])
