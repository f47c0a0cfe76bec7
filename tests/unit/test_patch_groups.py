"""Patches of what every rank does together: making groups, and times for a log line.

Groups of one rank, in this very process.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.resilience.patches.registry import PatchSet
from megatron.resilience.timing.clock import StepClock

pytestmark = pytest.mark.unit


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    """The whole set, as a job on a CPU applies it."""
    applied = PatchSet()
    applied.apply_for("cpu")
    yield applied
    if dist.is_initialized():
        dist.destroy_process_group()
    applied.undo_all()


def connect(backend: str = "gloo", *, rank: int = 0, world_size: int = 1) -> None:
    dist.init_process_group(
        backend,
        store=dist.HashStore(),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=10),
    )


def total() -> float:
    ones = torch.ones(3)
    dist.all_reduce(ones)
    return float(ones.sum())


def test_without_a_guard_groups_are_torchs(patches: PatchSet) -> None:
    assert patches.group_birth.guard is None
    connect()
    assert total() == 3


def test_every_group_is_made_through_the_guard(patches: PatchSet) -> None:
    made: list[Any] = []

    def guard(create: Callable[[], Any]) -> Any:
        made.append(create())
        return made[-1]

    patches.group_birth.guard = guard
    connect()
    dist.new_group([0])
    assert len(made) == 2
    assert total() == 3
    patches.group_birth.guard = None
    dist.new_group([0])
    assert len(made) == 2


def test_what_the_guard_raises_ends_the_making_and_another_can_follow(patches: PatchSet) -> None:
    def give_up(_create: Callable[[], Any]) -> Any:
        raise ConnectionError("given up")

    patches.group_birth.guard = give_up
    with pytest.raises(ConnectionError, match="given up"):
        connect()
    assert not dist.is_initialized()
    patches.group_birth.guard = None
    connect()
    assert total() == 3


def test_undone_creators_are_torchs_own() -> None:
    applied = PatchSet()
    dist.Backend._ensure_backend_registered("gloo")
    before = dist.Backend._plugins["GLOO"].creator_fn
    applied.apply_for("cpu")
    assert dist.Backend._plugins["GLOO"].creator_fn is not before
    applied.undo_all()
    assert dist.Backend._plugins["GLOO"].creator_fn is before


# -- timers --------------------------------------------------------------------


def timers() -> Any:
    return importlib.import_module("megatron.core.timers").Timers(2, "minmax")


@pytest.fixture
def meetings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which collectives the timers have asked for; upstream's own, over a group of one rank."""
    asked: list[str] = []
    module = importlib.import_module("megatron.core.timers")
    barrier, gather = dist.barrier, module.dist_all_gather_func

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            return original(*args, **kwargs)

        return call

    monkeypatch.setattr(dist, "barrier", counted("barrier", barrier))
    monkeypatch.setattr(module, "dist_all_gather_func", counted("gather", gather))
    return asked


def measure() -> str:
    """Lets a timer run once with barriers, and gives its line of the log."""
    group = timers()
    group("step").start(barrier=True)
    group("step").stop(barrier=True)
    group("step").set_elapsed(2.0)
    text: str = group.get_all_timers_string(["step"], normalizer=1.0, reset=False, barrier=True)
    return text


def test_a_job_without_plans_measures_as_upstream_does(
    patches: PatchSet, meetings: list[str]
) -> None:
    connect()
    assert "2000.00, 2000.00" in measure()
    assert meetings == ["barrier", "barrier", "barrier", "gather"]


def test_local_timers_meet_nobody_and_say_the_same(patches: PatchSet, meetings: list[str]) -> None:
    patches.local_timers.local = True
    connect()
    assert "2000.00, 2000.00" in measure()
    assert meetings == []


def test_a_local_time_stands_in_the_row_of_its_rank(patches: PatchSet) -> None:
    patches.local_timers.local = True
    store = importlib.import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    dist.init_process_group("fake", store=store, rank=2, world_size=4)
    group = timers()
    group("step").set_elapsed(1.5)
    found = group._get_elapsed_time_all_ranks(["none", "step"], reset=True, barrier=True)
    assert found.tolist() == [[0, 0], [0, 0], [0, 1.5], [0, 0]]
    assert group("step").elapsed() == 0.0, "and is reset, as upstream does"


# -- what the training loop does with other ranks ------------------------------


class Executor(SimpleNamespace):
    """Notes which stretches it was asked to run."""

    def __init__(self) -> None:
        super().__init__(phases=[], guard=self, before_training=None, schedulers=[], steps=[])
        self.alone: list[str] = []
        """Stretches in which nobody is met."""
        self.groups = SimpleNamespace(tp="new tp", pp="new pp", dp="new dp")
        self.before_training = self.schedulers.append
        self.saving = SimpleNamespace(run=self.save)
        self.saved = self.steps.append
        self.clock = StepClock(0)

    def save(self, guard: Any, save: Callable[[], None], *, step: int, directory: str) -> bool:
        """As a save that is broken off, done again, and succeeds."""
        guard.run("checkpoint", lambda: (float(bool(save())),))
        return directory == "checkpoints"

    def run(
        self, phase: str, attempt: Callable[[], tuple[float, ...]], *, ends: bool = True
    ) -> tuple[float, ...]:
        self.phases.append(phase)
        self.alone += [] if ends else [phase]
        attempt()  # broken off, say, and done again
        return attempt()


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, Executor, list[Any]]]:
    """Upstream's module whose own functions, of the same parameters, only note their calls."""
    module = importlib.import_module("megatron.training.training")
    calls: list[Any] = []

    def noted(name: str, answer: Any) -> None:
        original = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append((name, args, dict(kwargs)))
            return answer

        call.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        monkeypatch.setattr(module, name, call)

    noted("train", "trained")
    noted("save_checkpoint", None)
    noted("print_datetime", None)
    noted("checkpoint_and_decide_exit", 1)
    applied = PatchSet()
    applied.apply_for("cpu")
    executor = Executor()
    applied.training_loop.executor = executor
    yield module, executor, calls
    applied.undo_all()


def test_the_scheduler_is_handed_over_before_training(
    upstream: tuple[Any, Executor, list[Any]],
) -> None:
    module, executor, calls = upstream
    assert module.train("step", "model", "optimizer", "the scheduler", *range(6)) == "trained"
    assert executor.schedulers == ["the scheduler"]
    assert len(calls) == 1


def test_what_meets_other_ranks_can_be_done_again(
    upstream: tuple[Any, Executor, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, executor, calls = upstream
    told = SimpleNamespace(
        save="checkpoints", exit_signal_handler=False, exit_duration_in_mins=None
    )
    monkeypatch.setattr("megatron.training.global_vars._GLOBAL_ARGS", told)
    module.save_checkpoint(7, "model", tp_group="old tp", dp_group="old dp", other=1)
    leaves = module.checkpoint_and_decide_exit(*range(7))
    module.print_datetime("after training")
    assert executor.phases == ["checkpoint", "exit", "meeting"]
    assert executor.steps == [7]
    assert executor.clock._apart_s > 0.0, "no step is as long as a checkpoint"
    assert [name for name, _, _ in calls] == [
        *["save_checkpoint"] * 2,
        *["checkpoint_and_decide_exit"] * 2,
        *["print_datetime"] * 2,
    ]
    given = {"tp_group": "new tp", "dp_group": "new dp", "other": 1}
    assert calls[0] == ("save_checkpoint", (7, "model"), given)
    assert leaves is True
    assert executor.alone == ["exit"], "a rank that is through proves nothing of the others"
    told.exit_duration_in_mins = 5
    module.checkpoint_and_decide_exit(*range(7))
    assert executor.alone == ["exit"], "upstream compares times over all ranks"
