"""Which device and communication backend this process trains on.

Promise: CPU only when the machine has no GPU or the user wrote ``--device cpu``; the choice is made
once, before Megatron is imported, and printed.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from resihp_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    """Device."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: GPUs when there are any, else the CPU; cpu: the CPU even on a GPU machine; cuda: refuse
    to start without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The choice: ``kind`` is "cpu" or "cuda", ``backend`` the default for torch.distributed."""

    kind: Literal["cpu", "cuda"]
    backend: str
    name: str

    @property
    def banner(self) -> str:
        """The start-up line that says what trains."""
        return f"resihp: training on {self.name}, backend {self.backend}"


def choose_device(config: DeviceConfig, *, gpu_count: int, gpu_name: str = "GPU") -> Device:
    """Decides between CPU and GPU.

    Args:
        gpu_count: GPUs that torch can use here.

    Raises:
        UserError: ``--device cuda`` on a machine without a usable GPU.
    """
    if config.device == "cuda" and gpu_count == 0:
        raise UserError(
            "--device cuda: torch sees no GPU here; check the driver and CUDA_VISIBLE_DEVICES, "
            "or train on the CPU with --device cpu"
        )
    if config.device == "cpu" or gpu_count == 0:
        return Device(kind="cpu", backend="gloo", name=f"CPU ({os.cpu_count()} cores)")
    return Device(kind="cuda", backend="nccl", name=f"{gpu_count} x {gpu_name}")


def prepare_environment(device: Literal["auto", "cpu", "cuda"]) -> None:
    """Sets what must stand in the environment before torch is imported.

    ``--device cpu`` hides the GPUs: torch reads ``CUDA_VISIBLE_DEVICES`` at its first CUDA call. On
    a CPU, compiling Megatron's small fused functions takes 25 s a process and gains nothing.
    """
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if device == "cpu" or not _driver_present():
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    # Megatron demands it for sequence parallelism before Blackwell; harmless elsewhere.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def _driver_present() -> bool:
    return os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/dxg")
