"""The contract of every patch: fits what is installed, applies once, undoes without a trace."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron.resilience.device.patches as device_folder
from megatron.resilience import patches as patches_folder
from megatron.resilience.patches import registry
from megatron.resilience.patches.base import Patch, signature_drift, upstream_module
from megatron.resilience.patches.registry import KINDS, PatchSet, report
from resihp_ext.errors import UpstreamDriftError

pytestmark = pytest.mark.unit

DATASETS = "megatron.core.datasets.utils"
OPTIMIZER = "megatron.core.optimizer.distrib_optimizer"
TRAINING = "megatron.training.training"
ASYNC_UTILS = "megatron.core.dist_checkpointing.strategies.async_utils"
RANDOM = "megatron.core.tensor_parallel.random"
TIMERS = "megatron.core.timers"
GLOBALS = "megatron.training.global_vars"
MISSING = object()

every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def module_of(kind: type[Patch]) -> Any:
    return importlib.import_module(kind.__module__)


def owners() -> list[Any]:
    """Every object that some patch may change."""
    torch_name = module_of(registry.TorchName)
    names = {*torch_name.MODULES, torch_name.REFUSES_WITHOUT_CUDA, DATASETS, TRAINING, RANDOM}
    names |= {GLOBALS}
    modules = [importlib.import_module(name) for name in sorted(names)]
    caller = importlib.import_module(ASYNC_UTILS).PersistentAsyncCaller
    optimizer = importlib.import_module(OPTIMIZER).DistributedOptimizer
    timers = importlib.import_module(TIMERS)
    return [
        *modules,
        optimizer,
        caller,
        timers.Timer,
        timers.Timers,
        torch.Tensor,
        dist,
        dist.Backend,
    ]


def state_of_upstream() -> dict[tuple[str, str], Any]:
    """The very objects that upstream's modules and classes hold, by owner and name."""
    return {
        (str(owner), name): value
        for owner in owners()
        for name, value in vars(owner).items()
        if name not in {"__warningregistry__", "__annotations__"}
    }


def changed(before: dict[tuple[str, str], Any], after: dict[tuple[str, str], Any]) -> set[str]:
    return {
        name
        for owner, name in before.keys() | after.keys()
        if before.get((owner, name), MISSING) is not after.get((owner, name), MISSING)
    }


@pytest.fixture(autouse=True)
def no_trace_left() -> Iterator[None]:
    before = state_of_upstream()
    yield
    assert not changed(before, state_of_upstream())


@every_kind
def test_what_is_installed_looks_as_assumed(kind: type[Patch]) -> None:
    assert kind().problem() is None


@every_kind
def test_applied_twice_is_applied_once(kind: type[Patch]) -> None:
    patch = kind()
    untouched = state_of_upstream()
    assert not patch.applied
    patch.apply()
    once = state_of_upstream()
    patch.apply()
    twice = state_of_upstream()
    patch.undo()
    assert changed(untouched, once)
    assert not changed(once, twice)
    assert not patch.applied


@every_kind
def test_undone_is_the_object_that_was_there(kind: type[Patch]) -> None:
    patch = kind()
    before = state_of_upstream()
    patch.undo()  # of nothing: nothing
    for _ in range(2):
        patch.apply()
        patch.undo()
        assert not changed(before, state_of_upstream())
    patch.undo()
    assert not changed(before, state_of_upstream())


@every_kind
def test_unknown_version_is_refused(kind: type[Patch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.20.0")
    with pytest.raises(UpstreamDriftError) as refusal:
        kind().apply()
    message = str(refusal.value)
    assert kind.symbol in message
    assert "megatron-core 0.20.0 is not known" in message
    assert "install megatron-core 0.19." in message
    assert "\n" not in message


def other(*_args: Any, surprise: int = 0) -> str:
    return "something else"


def owner_of(name: str) -> Any:
    if name == "torch.Tensor":
        return torch.Tensor
    if name.endswith("DistributedOptimizer"):
        return importlib.import_module(OPTIMIZER).DistributedOptimizer
    if name in {"Timer", "Timers"}:
        return getattr(importlib.import_module(TIMERS), name)
    return importlib.import_module(name)


DRIFTS = [
    (registry.CompileHelpers, DATASETS, "compile_helpers"),
    (registry.DistributedAdam, "DistributedOptimizer", "state_dict"),
    (registry.DistributedAdam, "DistributedOptimizer", "load_state_dict"),
    (registry.DistributedAdam, "DistributedOptimizer", "_set_main_param_and_optimizer_states"),
    (registry.TrainingLog, TRAINING, "training_log"),
    (registry.TrainingLoop, TRAINING, "get_forward_backward_func"),
    (registry.TrainingLoop, TRAINING, "get_megatron_optimizer"),
    (registry.TrainingLoop, TRAINING, "is_pp_last_stage"),
    (registry.TrainingLoop, TRAINING, "consume_seqlen_stats_in_iteration"),
    (registry.TrainingLoop, TRAINING, "train"),
    (registry.TrainingLoop, TRAINING, "save_checkpoint"),
    (registry.TrainingLoop, TRAINING, "print_datetime"),
    (registry.TrainingLoop, TRAINING, "checkpoint_and_decide_exit"),
    (registry.LocalTimers, "Timer", "start"),
    (registry.LocalTimers, "Timer", "stop"),
    (registry.LocalTimers, "Timers", "_get_elapsed_time_all_ranks"),
    (registry.TensorboardWriter, GLOBALS, "_set_tensorboard_writer"),
    (registry.TorchName, TIMERS, "torch"),
    (registry.TorchName, "megatron.training.initialize", "torch"),
    (registry.TensorType, "torch.Tensor", "type"),
    (registry.RngState, RANDOM, "_get_cuda_rng_state"),
    (registry.RngState, RANDOM, "_set_cuda_rng_state"),
]


def own(drift: tuple[type[Patch], str, str]) -> bool:
    """Whether the symbol is gone once deleted: a method may have one of its name below."""
    _, owner, name = drift
    inherits = owner in {"torch.Tensor", "DistributedOptimizer", "Timer"}
    return not inherits or name.startswith("_set_main")


drifts = pytest.mark.parametrize(
    ("kind", "owner", "name"), DRIFTS, ids=[f"{kind.__name__}-{name}" for kind, _, name in DRIFTS]
)


def refused(kind: type[Patch]) -> str:
    """The one line with which ``kind`` refuses to apply; also what ``report`` says."""
    before = state_of_upstream()
    with pytest.raises(UpstreamDriftError) as refusal:
        kind().apply()
    assert not changed(before, state_of_upstream())
    statuses = {status.symbol: status for status in report("cpu")}
    assert statuses[kind.symbol].status == "drifted"
    assert statuses[kind.symbol].detail in str(refusal.value)
    assert kind.symbol in str(refusal.value)
    assert "\n" not in str(refusal.value)
    return statuses[kind.symbol].detail


@drifts
def test_symbol_of_another_shape_is_refused(
    kind: type[Patch], owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(owner_of(owner), name, other)
        detail = refused(kind)
    assert any(word in detail for word in ("surprise", " has no", "torch", "something"))


@pytest.mark.parametrize(("kind", "owner", "name"), [each for each in DRIFTS if own(each)])
def test_symbol_that_is_gone_is_refused(
    kind: type[Patch], owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(owner_of(owner), name)
        detail = refused(kind)
    assert name in detail


def test_method_that_is_no_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cuda", None)
        assert refused(registry.TensorCuda) == "Tensor.cuda is gone"


def test_creators_of_groups_that_are_kept_elsewhere_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(dist.Backend, "_ensure_backend_registered")
        assert "keeps its creators elsewhere" in refused(registry.GroupBirth)


def test_creators_of_groups_of_another_form_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(dist.Backend, "_plugins", dict.fromkeys(dist.Backend._plugins, other))
        assert refused(registry.GroupBirth) == "the creator of gloo groups has another form"


@pytest.mark.parametrize("kind", [registry.CompileHelpers, registry.TrainingLog, registry.RngState])
def test_module_that_is_gone_is_refused(kind: type[Patch], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_of(kind), "_MODULE", "megatron.core.no_such_module")
    assert "upstream module megatron.core.no_such_module is gone" in refused(kind)


def test_signatures_are_compared_by_names_in_order() -> None:
    def function(a: int, *, b: int = 1) -> None: ...

    assert signature_drift(function, "a, b") is None
    for expected in ("b, a", "a", "a, b, c", ""):
        assert f"expected ({expected})" in (signature_drift(function, expected) or "")


def test_upstream_module_is_the_module() -> None:
    assert upstream_module(DATASETS) is importlib.import_module(DATASETS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_whole_set_applies_and_undoes(device: str) -> None:
    patches = PatchSet()
    before = state_of_upstream()
    symbols = patches.apply_for(device)
    names = changed(before, state_of_upstream())
    assert patches.apply_for(device) == symbols
    patches.undo_all()
    assert symbols == tuple(kind.symbol for kind in KINDS if device in kind.devices)
    adam = {"state_dict", "load_state_dict", "_set_main_param_and_optimizer_states"}
    writer = {"schedule_async_call", "is_current_async_call_done", "close"}
    loop = {
        "get_forward_backward_func",
        "get_megatron_optimizer",
        "is_pp_last_stage",
        "consume_seqlen_stats_in_iteration",
        "train",
        "save_checkpoint",
        "print_datetime",
        "checkpoint_and_decide_exit",
    }
    collectives = {"all_reduce", "all_gather", "all_to_all_single", "broadcast", "reduce_scatter"}
    collectives |= {"all_gather_into_tensor", "reduce_scatter_tensor"}
    collectives |= {"dist_all_gather_func", "dist_reduce_scatter_func"}
    timers = {"start", "stop", "_get_elapsed_time_all_ranks"}
    everywhere = {"compile_helpers", "training_log", *loop, *adam, *writer, *timers, "_plugins"}
    everywhere |= {"_set_tensorboard_writer", *collectives}
    on_cpu = {"async_loop", "torch", "cuda", "type", "_get_cuda_rng_state", "_set_cuda_rng_state"}
    assert names == everywhere | (on_cpu if device == "cpu" else set())


def test_training_log_of_a_set_is_the_one_it_applies() -> None:
    patches = PatchSet()
    patches.apply_for("cuda")
    assert patches.training_log.applied
    patches.undo_all()
    assert not patches.training_log.applied


def test_one_that_does_not_fit_undoes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_of_upstream()
    last = KINDS[-1]
    monkeypatch.setattr(last, "drift", lambda self: "changed")
    with pytest.raises(UpstreamDriftError, match="changed"):
        PatchSet().apply_for("cpu")
    assert not changed(before, state_of_upstream())


def test_one_that_fails_half_way_undoes_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state_of_upstream()
    install: Callable[[Any], None] = registry.RngState.install

    def half(self: Any) -> None:
        install(self)
        raise OSError("half way")

    monkeypatch.setattr(registry.RngState, "install", half)
    with pytest.raises(OSError, match="half way"):
        PatchSet().apply_for("cpu")
    assert not changed(before, state_of_upstream())


def test_report_applies_nothing_and_names_what_a_gpu_does_not_need() -> None:
    before = state_of_upstream()
    assert {status.status for status in report("cpu")} == {"applies"}
    on_gpu = {status.symbol: status.status for status in report("cuda")}
    assert on_gpu == {
        kind.symbol: "applies" if "cuda" in kind.devices else "not needed" for kind in KINDS
    }
    assert not changed(before, state_of_upstream())


def test_every_patch_module_is_registered() -> None:
    folders = (patches_folder, device_folder)
    found = {
        value
        for folder in folders
        for info in pkgutil.iter_modules(folder.__path__, f"{folder.__name__}.")
        for value in vars(importlib.import_module(info.name)).values()
        if inspect.isclass(value) and issubclass(value, Patch) and value is not Patch
    }
    assert found == set(KINDS)
    assert len({kind.symbol for kind in KINDS}) == len(KINDS)


@every_kind
def test_header_says_what_why_and_how_long(kind: type[Patch]) -> None:
    header = ast.get_docstring(ast.parse(inspect.getsource(module_of(kind)))) or ""
    for word in ("Patch:", "Symbol:", "Versions:", "Reason:", "Delete when:"):
        assert f"\n{word} " in f"\n{header}"
    assert kind.reason
    assert kind.delete_when
