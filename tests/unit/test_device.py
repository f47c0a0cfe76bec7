"""Which device trains, what stands for its memory, and that a GPU is left alone."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from megatron.resilience.device import choose
from megatron.resilience.device.choose import DeviceConfig, choose_device, prepare_environment
from megatron.resilience.device.host_memory import peak_rss_bytes, rss_bytes, total_bytes
from megatron.resilience.device.patches.torch_name import TorchName
from megatron.resilience.device.stand_in import CpuDevice, CpuTorch
from megatron.resilience.patches.registry import KINDS, PatchSet
from megatron.resilience.start import command_line
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit

MIB = 2**20
VARIABLES = ("CUDA_VISIBLE_DEVICES", "TORCHDYNAMO_DISABLE", "CUDA_DEVICE_MAX_CONNECTIONS")


@pytest.mark.parametrize(
    ("wanted", "gpu_count", "kind", "backend"),
    [
        ("auto", 0, "cpu", "gloo"),
        ("auto", 1, "cuda", "nccl"),
        ("auto", 8, "cuda", "nccl"),
        ("cpu", 0, "cpu", "gloo"),
        ("cpu", 8, "cpu", "gloo"),
        ("cuda", 2, "cuda", "nccl"),
    ],
)
def test_choice(wanted: Any, gpu_count: int, kind: str, backend: str) -> None:
    device = choose_device(DeviceConfig(device=wanted), gpu_count=gpu_count, gpu_name="H100")
    assert (device.kind, device.backend) == (kind, backend)
    assert device.banner.startswith("resihp: training on ")
    assert backend in device.banner
    assert ("CPU" if kind == "cpu" else f"{gpu_count} x H100") in device.banner


def test_cuda_without_a_gpu_is_one_line_that_says_what_to_do() -> None:
    with pytest.raises(UserError) as refusal:
        choose_device(DeviceConfig(device="cuda"), gpu_count=0)
    line = str(refusal.value)
    assert "\n" not in line
    for part in ("--device cuda", "no GPU", "CUDA_VISIBLE_DEVICES", "--device cpu"):
        assert part in line


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which nothing about devices is set, restored afterwards."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "before")  # registers the restoration also of what is unset
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("device", "driver", "hidden", "compiles"),
    [
        ("cpu", False, True, False),
        ("cpu", True, True, False),
        ("auto", False, False, False),
        ("auto", True, False, True),
        ("cuda", True, False, True),
    ],
)
def test_environment_before_torch(
    device: Any, driver: bool, hidden: bool, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "_driver_present", lambda: driver)
    prepare_environment(device)
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == ("" if hidden else None)
    assert os.environ.get("TORCHDYNAMO_DISABLE") == (None if compiles else "1")
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"


@pytest.mark.usefixtures("bare")
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "_driver_present", lambda: True)
    for name, value in zip(VARIABLES, ("3", "0", "8"), strict=True):
        monkeypatch.setenv(name, value)
    prepare_environment("cuda")
    assert [os.environ[name] for name in VARIABLES] == ["3", "0", "8"]
    prepare_environment("cpu")
    assert [os.environ[name] for name in VARIABLES] == ["", "0", "8"]


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(
    ("words", "hidden"),
    [
        (["--device", "cpu"], True),
        (["--device=cpu"], True),
        (["--device", "cuda", "--device", "cpu"], True),
        (["--device=cpu", "--device", "auto"], False),
        ([], False),
    ],
)
def test_the_last_device_on_the_command_line_counts(words: list[str], hidden: bool) -> None:
    command_line(words)
    assert ("CUDA_VISIBLE_DEVICES" in os.environ) == hidden


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize("words", [["--device", "tpu"], ["--device="], ["--device"]])
def test_unknown_device_is_one_line(words: list[str]) -> None:
    with pytest.raises(UserError, match="choose one of auto, cpu, cuda") as refusal:
        command_line(words)
    assert "\n" not in str(refusal.value)


def test_choosing_imports_neither_torch_nor_megatron() -> None:
    """The environment must stand before torch reads it."""
    code = (
        "import sys; from megatron.resilience.start import command_line\n"
        "command_line(['--device', 'cpu', '--preset', 'tiny'])\n"
        "assert not {'torch', 'megatron.core', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], timeout=30, check=True)


def test_memory_figures_are_bytes_of_this_process() -> None:
    before = rss_bytes()
    block = np.ones(64 * MIB, dtype=np.uint8)
    during, peak = rss_bytes(), peak_rss_bytes()
    assert 60 * MIB < during - before < 100 * MIB
    assert peak >= during - MIB, "the kernel counts the peak a little late"
    del block
    assert rss_bytes() < during - 60 * MIB
    assert peak_rss_bytes() >= peak
    assert peak < total_bytes()
    assert total_bytes() == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_importing_changes_nothing_of_torch() -> None:
    assert type(torch.cuda) is type(torch)
    assert torch.device is not CpuDevice
    assert not isinstance(torch, CpuTorch)


def test_with_a_gpu_the_device_room_touches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    device = choose_device(DeviceConfig(), gpu_count=torch.cuda.device_count(), gpu_name="H100")
    patches = PatchSet()
    try:
        symbols = patches.apply_for(device.kind)
        ours = {kind.symbol for kind in KINDS if ".device." in kind.__module__}
        assert len(ours) == 5
        assert not ours & set(symbols)
        for name in sys.modules[TorchName.__module__].MODULES:
            assert importlib.import_module(name).torch is torch
        assert vars(torch.Tensor).keys().isdisjoint({"cuda", "type"})
        assert torch.cuda.is_available()
    finally:
        patches.undo_all()
