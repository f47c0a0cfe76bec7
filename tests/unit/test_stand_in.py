"""What Megatron's modules see in place of ``torch`` on a CPU."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
import torch

from megatron.resilience.device.host_memory import peak_rss_bytes, rss_bytes, total_bytes
from megatron.resilience.device.stand_in import _FACTORIES, CpuDevice, CpuTorch, cpu_cuda, to_cpu
from megatron.resilience.upstream.origin import wheel_folder

pytestmark = pytest.mark.unit

MIB = 2**20


@pytest.fixture
def cuda() -> Any:
    return cpu_cuda(available=False)


@pytest.mark.parametrize(
    "name",
    ["memory_allocated", "memory_reserved", "device_memory_used"],
)
def test_memory_of_the_device_is_the_resident_set(cuda: Any, name: str) -> None:
    assert abs(getattr(cuda, name)() - rss_bytes()) < 16 * MIB
    assert abs(getattr(cuda, name)("cuda:0") - rss_bytes()) < 16 * MIB


def test_memory_statistics_have_every_key_that_megatron_reads(cuda: Any) -> None:
    text = (wheel_folder() / "megatron/training/training.py").read_text(encoding="utf-8")
    read = set(re.findall(r'mem_stats\["([^"]+)"\]', text))
    stats = cuda.memory_stats()
    assert read == stats.keys()
    assert stats["allocated_bytes.all.peak"] >= stats["allocated_bytes.all.current"] - MIB > 0


@pytest.mark.parametrize("name", ["max_memory_allocated", "max_memory_reserved"])
def test_peak_of_the_device_is_the_peak_of_the_resident_set(cuda: Any, name: str) -> None:
    assert abs(getattr(cuda, name)() - peak_rss_bytes()) < 16 * MIB


def test_one_device_whose_name_is_cpu(cuda: Any) -> None:
    assert cuda.device_count() == 1
    assert cuda.current_device() == "cpu"
    assert torch.empty(1, device=cuda.current_device()).device.type == "cpu"
    assert cuda.get_device_capability() == (0, 0), "older than anything Megatron asks for"
    properties = cuda.get_device_properties(cuda.current_device())
    assert (properties.name, properties.major) == ("cpu", 0)
    assert properties.total_memory == total_bytes()
    assert not cuda.is_current_stream_capturing()


def test_calls_without_an_effect_take_cudas_arguments(cuda: Any) -> None:
    assert cuda.synchronize() is None
    assert cuda.synchronize(device="cuda:0") is None
    assert cuda.set_device(3) is None
    assert cuda.set_stream(cuda.current_stream()) is None
    assert cuda.empty_cache() is None
    assert cuda.reset_peak_memory_stats("cuda") is None
    assert cuda.nvtx.range_push("step") is None
    assert cuda.nvtx.range_pop() is None


def test_streams(cuda: Any) -> None:
    stream = cuda.Stream(device="cuda", priority=cuda.Stream.priority_range()[1])
    with cuda.stream(stream) as inside:
        assert inside is stream
        stream.wait_stream(cuda.current_stream())
    with cuda.stream(None) as inside:
        assert isinstance(inside, cuda.Stream)
    event = stream.record_event()
    assert isinstance(event, cuda.Event)
    assert stream.record_event(event) is event
    stream.wait_event(event)
    stream.synchronize()
    assert stream.query()
    assert event.query()
    assert cuda.default_stream() is cuda.current_stream("cuda:0")
    with pytest.raises(ZeroDivisionError), cuda.stream(stream):
        _ = 1 / 0


def test_events_measure_milliseconds(cuda: Any) -> None:
    start, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record(cuda.current_stream())
    end.synchronize()
    end.wait()
    assert 19 < start.elapsed_time(end) < 2000
    assert end.elapsed_time(start) == -start.elapsed_time(end)


def test_random_state_is_the_cpus(cuda: Any) -> None:
    kept = torch.get_rng_state()
    try:
        cuda.manual_seed(5)
        state = cuda.get_rng_state()
        first = torch.rand(4)
        cuda.set_rng_state(state, device="cuda")
        assert torch.equal(first, torch.rand(4))
        cuda.random.set_rng_state(state)
        assert torch.equal(state, cuda.random.get_rng_state())
        cuda.manual_seed_all(5)
        assert torch.equal(first, torch.rand(4))
    finally:
        torch.set_rng_state(kept)


@pytest.mark.parametrize("name", ["no_such_name", "memory_alocated", "synchronise"])
def test_unknown_names_raise(name: str) -> None:
    for module in (CpuTorch(), cpu_cuda(available=True)):
        with pytest.raises(AttributeError, match=name):
            getattr(module, name)


def test_what_has_no_stand_in_is_torchs_own(cuda: Any) -> None:
    """And says itself that there is no GPU, instead of an answer that nobody thought of."""
    for name in ("OutOfMemoryError", "FloatTensor", "mem_get_info", "CUDAGraph", "device"):
        assert getattr(cuda, name) is getattr(torch.cuda, name)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):
            cuda.mem_get_info()


@pytest.mark.parametrize("available", [True, False])
def test_availability_is_what_was_asked_for(available: bool) -> None:
    assert cpu_cuda(available=available).is_available() is available
    assert CpuTorch(cuda_available=available).cuda.is_available() is available


def test_availability_is_false_unless_asked_for() -> None:
    assert CpuTorch().cuda.is_available() is False


CUDA_SPELLINGS = ["cuda", "cuda:3", 0, torch.device("cuda"), torch.device("cuda", 1)]


@pytest.mark.parametrize("device", CUDA_SPELLINGS, ids=str)
def test_every_spelling_of_a_gpu_is_the_cpu(device: Any) -> None:
    fake: Any = CpuTorch()
    assert torch.device(to_cpu(device)) == torch.device("cpu")
    assert fake.device(device) == torch.device("cpu")
    assert fake.zeros(2, device=device).device.type == "cpu"


@pytest.mark.parametrize("device", ["cpu", "meta", torch.device("meta"), None])
def test_other_devices_keep_their_meaning(device: Any) -> None:
    assert to_cpu(device) is device
    if device is not None:
        assert CpuDevice(device) == torch.device(device)
        assert CpuTorch().empty(2, device=device).device == torch.device(device)


def test_device_is_a_type_and_a_constructor() -> None:
    fake: Any = CpuTorch()
    assert fake.device("cuda", 3) == fake.device(type="cuda", index=1) == torch.device("cpu")
    assert isinstance(torch.device("meta"), fake.device)
    assert not isinstance("cpu", fake.device)
    with pytest.raises(RuntimeError):
        fake.device("no such device")


@pytest.mark.parametrize("name", _FACTORIES)
def test_factories_build_on_the_cpu_what_torch_builds(name: str) -> None:
    arguments: dict[str, Any] = {
        "arange": (3,),
        "full": ((2, 2), 7),
        "tensor": ([1, 2],),
        "empty_like": (torch.ones(3),),
        "zeros_like": (torch.ones(3),),
    }
    call = arguments.get(name, (2, 3))
    built = getattr(CpuTorch(), name)(*call, device="cuda", dtype=torch.float64)
    assert built.device.type == "cpu"
    expected = getattr(torch, name)(*call, dtype=torch.float64)
    assert (built.shape, built.dtype) == (expected.shape, expected.dtype)
    if not name.startswith(("empty", "rand")):
        assert torch.equal(built, expected)


def test_pinned_memory_needs_no_driver() -> None:
    assert CpuTorch().tensor([1], device="cpu", pin_memory=True).tolist() == [1]


def test_all_other_names_are_torchs_and_found_once() -> None:
    fake: Any = CpuTorch()
    assert "nn" not in vars(fake)
    for name in ("nn", "Tensor", "float32", "distributed", "no_grad"):
        assert getattr(fake, name) is getattr(torch, name)
        assert vars(fake)[name] is getattr(torch, name)
