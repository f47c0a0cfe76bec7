"""What Megatron's modules see under the name ``torch`` on the CPU device.

Megatron spells its device ``"cuda"`` in some three hundred places. Faking ``torch.cuda`` for the
whole process would also deceive torch itself (its Adam asks the accelerator for graph capture once
``is_available()`` is true), and a global ``TorchFunctionMode`` costs 8 to 28 % of a step. So only
the *name* ``torch`` inside chosen Megatron modules is bound to a :class:`CpuTorch`: every attribute
is torch's own, except the tensor factories, ``torch.device`` and ``torch.cuda``.

Attributes are cached on first use, so a lookup costs the same as on the real module.
"""

from __future__ import annotations

import functools
import os
import time
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron.resilience.device.host_memory import peak_rss_bytes, rss_bytes, total_bytes

_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)


_NO_EFFECT = (
    "synchronize",
    "set_device",
    "set_stream",
    "empty_cache",
    "reset_peak_memory_stats",
)


def to_cpu(device: Any) -> Any:
    """Maps any spelling of a CUDA device (str, index, ``torch.device``) to ``"cpu"``."""
    if isinstance(device, int) or (isinstance(device, str) and device.startswith("cuda")):
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def build(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = to_cpu(kwargs["device"])
        # Pinning is for copies to a GPU, and asks for a driver.
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return build


class _DeviceMeta(type):
    """Lets ``isinstance(x, torch.device)`` keep its meaning behind the stand-in."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.device)

    def __call__(cls, *args: Any, **kwargs: Any) -> torch.device:
        spelled = ":".join(str(part) for part in (*args, *kwargs.values()))
        on_gpu = spelled.startswith("cuda") or spelled.isdigit()
        return torch.device("cpu" if on_gpu else spelled)


class CpuDevice(metaclass=_DeviceMeta):
    """Stands for ``torch.device``; ``CpuDevice("cuda:3")`` is ``torch.device("cpu")``."""


class CpuStream:
    """A CUDA stream on a device without streams: work is finished when a call returns."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        pass

    def __enter__(self) -> CpuStream:
        return self

    def __exit__(self, *_exc: object) -> None:
        pass

    def wait_stream(self, _stream: Any) -> None:
        pass

    def wait_event(self, _event: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        event = event or CpuEvent()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class CpuEvent:
    """A CUDA event by the host's clock; ``elapsed_time`` is in milliseconds, as on CUDA."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self._recorded_s = 0.0

    def record(self, _stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, later: CpuEvent) -> float:
        return (later._recorded_s - self._recorded_s) * 1e3

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def wait(self, _stream: Any = None) -> None:
        pass


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


def _memory_stats(*_args: Any, **_kwargs: Any) -> dict[str, int]:
    """The keys that Megatron reads; a host counts no blocks."""
    return {
        "reserved_bytes.all.current": rss_bytes(),
        "allocated_bytes.all.current": rss_bytes(),
        "allocated_bytes.all.peak": peak_rss_bytes(),
        "allocation.all.current": 0,
    }


def cpu_cuda(*, available: bool) -> types.ModuleType:
    """Builds the stand-in for ``torch.cuda``.

    Args:
        available: What ``is_available()`` answers. True only for the module that refuses to
            start without CUDA; everywhere else the honest answer selects Megatron's CPU branches.
    """
    cuda = types.ModuleType("torch.cuda")
    stream = CpuStream()
    replaced: dict[str, Any] = {
        "is_available": lambda: available,
        "device_count": lambda: 1,
        "current_device": lambda: "cpu",
        "get_device_capability": lambda *_a, **_k: (0, 0),
        "get_device_properties": lambda *_a, **_k: types.SimpleNamespace(
            name="cpu",
            major=0,
            minor=0,
            total_memory=total_bytes(),
            multi_processor_count=os.cpu_count(),
        ),
        "current_stream": lambda *_a, **_k: stream,
        "default_stream": lambda *_a, **_k: stream,
        "stream": lambda chosen: chosen if chosen is not None else stream,
        "is_current_stream_capturing": lambda: False,
        "Stream": CpuStream,
        "Event": CpuEvent,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": torch.manual_seed,
        "get_rng_state": lambda *_a, **_k: torch.get_rng_state(),
        "set_rng_state": lambda state, *_a, **_k: torch.set_rng_state(state),
        # A process has no device memory here; its resident set is what Megatron's memory log means.
        "memory_allocated": lambda *_a, **_k: rss_bytes(),
        "memory_reserved": lambda *_a, **_k: rss_bytes(),
        "max_memory_allocated": lambda *_a, **_k: peak_rss_bytes(),
        "max_memory_reserved": lambda *_a, **_k: peak_rss_bytes(),
        "device_memory_used": lambda *_a, **_k: rss_bytes(),
        "memory_stats": _memory_stats,
    }
    replaced.update(dict.fromkeys(_NO_EFFECT, _nothing))
    for name, value in replaced.items():
        setattr(cuda, name, value)
    cuda.random = types.SimpleNamespace(  # type: ignore[attr-defined]
        get_rng_state=replaced["get_rng_state"], set_rng_state=replaced["set_rng_state"]
    )
    cuda.nvtx = types.SimpleNamespace(range_push=_nothing, range_pop=_nothing)  # type: ignore[attr-defined]
    # Anything else (types named in annotations, ``OutOfMemoryError``) stays torch's own.
    cuda.__getattr__ = functools.partial(getattr, torch.cuda)  # type: ignore[method-assign]
    return cuda


class CpuTorch(types.ModuleType):
    """The module ``torch`` with ``"cuda"`` meaning the CPU."""

    def __init__(self, *, cuda_available: bool = False) -> None:
        super().__init__("torch")
        self.device = CpuDevice
        self.cuda = cpu_cuda(available=cuda_available)
        for name in _FACTORIES:
            setattr(self, name, _on_cpu(getattr(torch, name)))

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        setattr(self, name, value)
        return value
