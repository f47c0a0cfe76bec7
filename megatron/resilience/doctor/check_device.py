"""Device and communication backends: what a job would run on if it were started now."""

from collections import Counter

from megatron.resilience.doctor.facts import DeviceFacts
from megatron.resilience.doctor.finding import Finding, fail, ok, warn


def check_device(device: DeviceFacts) -> list[Finding]:
    """Device first, then the backend it needs."""
    if device.torch_error is not None:
        return [fail("device", f"torch cannot be imported: {device.torch_error}", "make .venv")]
    return [_device(device), _gloo(device), _nccl(device)]


def _device(device: DeviceFacts) -> Finding:
    if device.gpu_names:
        counted = Counter(device.gpu_names)
        names = ", ".join(f"{count} x {name}" for name, count in counted.items())
        return ok("device", f"{names} (CUDA {device.cuda_build})")
    if device.nvidia_device_files:
        built = f"CUDA {device.cuda_build}" if device.cuda_build else "no CUDA at all"
        return warn(
            "device",
            f"CPU, although {device.nvidia_device_files[0]} exists; torch is built for {built}",
            "check nvidia-smi, CUDA_VISIBLE_DEVICES and that the driver is new enough",
        )
    return ok("device", "CPU (no GPU on this machine)")


def _gloo(device: DeviceFacts) -> Finding:
    if device.gloo:
        return ok("gloo", "available")
    return fail("gloo", "this torch is built without gloo", "install torch from PyPI (make .venv)")


def _nccl(device: DeviceFacts) -> Finding:
    if device.nccl:
        return ok("nccl", "available")
    if device.gpu_names:
        return fail("nccl", "this torch is built without NCCL", "install a CUDA build of torch")
    return ok("nccl", "not built into this torch; a CPU job does not need it")
