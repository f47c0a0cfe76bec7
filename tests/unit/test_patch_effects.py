"""What each patch does to upstream while it is applied, by running upstream's own code."""

from __future__ import annotations

import functools
import importlib
import logging
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.resilience.patches import registry
from megatron.resilience.patches.distributed_adam import create_state, separate_steps
from megatron.resilience.patches.registry import PatchSet
from megatron.resilience.patches.training_log import Iteration
from resihp_ext.errors import UpstreamDriftError

pytestmark = pytest.mark.unit


def upstream(name: str) -> Any:
    """A module of upstream, imported by the first test that runs, not by collecting tests."""
    return importlib.import_module(f"megatron.{name}")


@pytest.fixture
def apply() -> Iterator[Callable[[type], Any]]:
    """Applies patches of a kind, undone after the test."""
    applied: list[Any] = []

    def one(kind: type) -> Any:
        applied.append(kind())
        applied[-1].apply()
        return applied[-1]

    yield one
    for patch in reversed(applied):
        patch.undo()


def test_upstream_still_needs_what_the_wheel_lacks() -> None:
    folder = Path(upstream("core.datasets.utils").__file__).parent
    assert not (folder / "Makefile").exists(), "delete the patch when the wheel ships one"
    assert list(folder.glob("helpers_cpp*.so"))


def test_compiled_helper_is_imported_and_nothing_is_run(
    apply: Callable[[type], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_a, **_k: pytest.fail("runs make"))
    apply(registry.CompileHelpers)
    assert upstream("core.datasets.utils").compile_helpers() is None
    assert upstream("core.datasets.helpers_cpp")


def test_upstream_looks_the_helper_up_when_it_calls_it() -> None:
    """A name imported at the top of the module would keep the original."""
    initialize = upstream("training.initialize")
    assert not hasattr(initialize, "compile_helpers")
    assert "compile_helpers" in initialize._compile_dependencies.__code__.co_varnames


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands for upstream's function, which needs a whole job around it; same signature."""
    calls: list[Any] = []
    original = upstream("training.training").training_log

    @functools.wraps(original)
    def recorded(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "upstream's answer"

    monkeypatch.setattr(upstream("training.training"), "training_log", recorded)
    return calls


def call_as_upstream_does(**changes: Any) -> Any:
    """The first eleven by position, the others by name, as upstream's loop calls it."""
    values: dict[str, Any] = {
        "loss_dict": {"lm loss": torch.tensor([1 / 3], dtype=torch.float64)},
        "total_loss_dict": {},
        "learning_rate": 1e-3,
        "iteration": 7,
        "loss_scale": 1.0,
        "report_memory_flag": False,
        "skipped_iter": 0,
        "grad_norm": torch.tensor(2.5),
        "params_norm": None,
        "num_zeros_in_grad": None,
        "max_attention_logit": None,
    } | changes
    return upstream("training.training").training_log(
        *values.values(), pg_collection=None, is_first_iteration=False
    )


def test_observer_sees_each_iteration_unrounded(
    apply: Callable[[type], Any], log: list[Any]
) -> None:
    seen: list[Iteration] = []
    patch = apply(registry.TrainingLog)
    patch.observer = seen.append
    assert call_as_upstream_does() == "upstream's answer"
    call_as_upstream_does(iteration=8, grad_norm=None, learning_rate=None, loss_dict={})
    call_as_upstream_does(iteration=9, skipped_iter=1)
    assert seen[0] == Iteration(
        step=7, losses={"lm loss": 1 / 3}, grad_norm=2.5, learning_rate=1e-3, skipped=False
    )
    assert seen[1] == Iteration(
        step=8, losses={}, grad_norm=None, learning_rate=None, skipped=False
    )
    assert (seen[2].step, seen[2].skipped) == (9, True)
    assert len(log) == 3
    assert log[0][1] == {"pg_collection": None, "is_first_iteration": False}


def test_without_an_observer_nothing_changes(apply: Callable[[type], Any], log: list[Any]) -> None:
    apply(registry.TrainingLog)
    assert call_as_upstream_does() == "upstream's answer"
    assert len(log) == 1


def test_upstreams_loop_looks_the_log_up_by_name() -> None:
    assert "training_log" in upstream("training.training").train.__code__.co_names


# -- a distributed optimizer's Adam --------------------------------------------


def adam(count: int = 2) -> torch.optim.Adam:
    return torch.optim.Adam([torch.nn.Parameter(torch.ones(3)) for _ in range(count)])


def step(optimizer: torch.optim.Adam) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()


def test_created_state_is_what_adam_creates_itself() -> None:
    created, plain = adam(), adam()
    create_state(created)
    step(plain)
    (first, *_), (expected, *_) = created.state.values(), plain.state.values()
    assert first.keys() == expected.keys()
    for name, tensor in first.items():
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)
        assert not tensor.any()
    step(created)
    pairs = zip(created.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True)
    for one, other in pairs:
        assert torch.equal(one, other), "a step from created state is a first step"


def test_existing_state_is_kept() -> None:
    optimizer = adam()
    step(optimizer)
    before = {name: id(value) for name, value in next(iter(optimizer.state.values())).items()}
    create_state(optimizer)
    after = {name: id(value) for name, value in next(iter(optimizer.state.values())).items()}
    assert before == after


def test_a_shared_step_would_count_twice_and_a_separate_one_does_not() -> None:
    counts = []
    for separate in (False, True):
        optimizer = adam(2)
        create_state(optimizer)
        shared = torch.tensor(10.0)
        for state in optimizer.state.values():
            state["step"] = shared
        if separate:
            separate_steps(optimizer)
        step(optimizer)
        counts.append([state["step"].item() for state in optimizer.state.values()])
    assert counts == [[12.0, 12.0], [11.0, 11.0]], "delete the patch when the first changes"


def test_the_step_is_kept_unless_it_is_given(
    apply: Callable[[type], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, given = upstream("core.optimizer.distrib_optimizer").DistributedOptimizer, []

    def record(self: Any, model_param: Any, tensors: Any) -> None:
        given.append(tensors)

    monkeypatch.setattr(kind, "_set_main_param_and_optimizer_states", record)
    patch = apply(registry.DistributedAdam)
    assert patch.applied, "neither Apex nor Transformer Engine is installed here"
    method = kind._set_main_param_and_optimizer_states
    method(None, None, {"param": 1})
    method(None, None, {"param": 1, "step": 2})
    assert given == [{"step": None, "param": 1}, {"step": 2, "param": 1}]
    patch.undo()


def test_fused_optimizers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = upstream("core.optimizer.distrib_optimizer").DistributedOptimizer
    before = dict(vars(kind))
    monkeypatch.setattr(upstream("core.optimizer.distrib_optimizer"), "HAVE_APEX_OR_TE", True)
    patch = registry.DistributedAdam()
    patch.apply()
    assert not patch.applied
    assert dict(vars(kind)) == before


def test_cuda_of_a_tensor_is_the_tensor(apply: Callable[[type], Any]) -> None:
    tensor, module = torch.ones(2), torch.nn.Linear(2, 2)
    apply(registry.TensorCuda)
    assert tensor.cuda() is tensor
    assert tensor.cuda(0, non_blocking=True) is tensor
    assert next(module.cuda().parameters()).device.type == "cpu"


def call_from(module: str, expression: str) -> Any:
    """Evaluates an expression as code of ``module`` would."""
    tensors = {"x": torch.ones(1), "h": torch.ones(1, dtype=torch.bfloat16)}
    return eval(expression, {"__name__": module, "torch": torch, **tensors})


def test_type_names_are_cudas_for_megatron_alone(apply: Callable[[type], Any]) -> None:
    apply(registry.TensorType)
    inside, outside = "megatron.core.optimizer.optimizer", "torch.optim.adam"
    assert call_from(inside, "x.type()") == "torch.cuda.FloatTensor"
    assert call_from(inside, "h.type()") == "torch.cuda.BFloat16Tensor"
    assert call_from(outside, "x.type()") == "torch.FloatTensor"
    assert call_from("megatron.resilience.job", "x.type()") == "torch.FloatTensor"
    assert call_from("megatron.core_of_others", "x.type()") == "torch.FloatTensor"
    assert call_from(inside, "x.type(torch.float64)").dtype == torch.float64


@pytest.fixture
def rng() -> Iterator[None]:
    kept = torch.get_rng_state()
    yield
    torch.set_rng_state(kept)


@pytest.mark.usefixtures("rng")
def test_megatrons_tracker_keeps_two_streams_apart(caplog: pytest.LogCaptureFixture) -> None:
    """Upstream's own tracker, on the CPU's generator; nothing is warned about."""
    patches = PatchSet()
    patches.apply_for("cpu")
    try:
        drawn = []
        for draws_between in (0, 5):
            torch.manual_seed(1)
            tracker = upstream("core.tensor_parallel.random").CudaRNGStatesTracker()
            tracker.add("stream", 42)
            outside = [torch.rand(3)]
            with tracker.fork("stream"):
                inside = [torch.rand(3)]
            torch.rand(draws_between)
            with tracker.fork("stream"):
                inside.append(torch.rand(3))
            drawn.append((outside, inside))
    finally:
        patches.undo_all()
    (first_out, first_in), (second_out, second_in) = drawn
    assert torch.equal(torch.stack(first_in), torch.stack(second_in)), "own stream of numbers"
    assert torch.equal(first_out[0], second_out[0])
    assert not torch.equal(first_in[0], first_in[1]), "which goes on"
    assert not torch.equal(first_in[0], first_out[0])
    assert not caplog.records


def test_only_the_spurious_warning_is_dropped_and_only_while_applied(
    apply: Callable[[type], Any], caplog: pytest.LogCaptureFixture
) -> None:
    logger = logging.getLogger(upstream("core.tensor_parallel.random").__name__)
    spurious = "CPU RNG state changed within GPU RNG context"
    assert spurious in Path(upstream("core.tensor_parallel.random").__file__).read_text(
        encoding="utf-8"
    )
    patch = apply(registry.RngState)
    logger.warning(spurious)
    logger.warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]
    patch.undo()
    logger.warning(spurious)
    assert len(caplog.records) == 2


def test_megatron_builds_on_the_cpu_what_it_calls_cuda(apply: Callable[[type], Any]) -> None:
    names = importlib.import_module(registry.TorchName.__module__)
    apply(registry.TorchName)
    stand_ins = {id(importlib.import_module(name).torch) for name in names.MODULES}
    assert len(stand_ins) == 1
    schedules = upstream("core.pipeline_parallel.schedules")
    assert schedules.torch is not torch
    assert schedules.torch.zeros(1, device="cuda").device.type == "cpu"
    assert not schedules.torch.cuda.is_available()
    initialize = importlib.import_module(names.REFUSES_WITHOUT_CUDA)
    assert initialize.torch.cuda.is_available(), "the one that would refuse to start"


def test_applied_stand_in_is_not_taken_for_torch(apply: Callable[[type], Any]) -> None:
    """A second job in the same process, before the first has ended, is refused, not stacked."""
    apply(registry.TorchName)
    with pytest.raises(UpstreamDriftError, match="no longer imports torch by that name"):
        registry.TorchName().apply()
