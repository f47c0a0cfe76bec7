"""What the doctor looks at, as frozen data, so that every verdict can be tested without a machine.

None always means "could not be read or is not there". Sizes are bytes.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageFacts:
    """One installed distribution against the range that this project pins."""

    name: str
    installed: str | None
    wanted: str | None
    """A PEP 440 specifier such as ``>=0.19.2,<0.20``; None when this project is not installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OriginFacts:
    """From where Python would import one Megatron package."""

    module: str
    found: str | None
    """Folder that an import would use."""
    expected: str | None
    """Folder of the installed megatron-core wheel."""
    shadow: str | None = None
    """Path of a ``megatron/__init__.py``, which must not exist anywhere on the path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceFacts:
    """What torch sees of accelerators and communication libraries."""

    torch_error: str | None = None
    """Why ``import torch`` failed; then nothing else here is known."""
    gpu_names: tuple[str, ...] = ()
    cuda_build: str | None = None
    """CUDA version torch was built for."""
    nvidia_device_files: tuple[str, ...] = ()
    """``/dev/nvidia0`` and so on: GPUs that the system has, whatever torch sees."""
    gloo: bool = False
    nccl: bool = False
    nccl_version: tuple[int, ...] | None = None
    """The library in use; known only with a GPU."""
    nccl_package: str | None = None
    """Name and version of the installed ``nvidia-nccl`` package."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchFacts:
    """One upstream symbol that the CPU device replaces."""

    symbol: str
    status: str
    """``applies``, ``drifted`` or ``not needed``."""
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtrasFacts:
    """Optional packages; none of them is a dependency."""

    has_gpu: bool
    apex_folder: str | None = None
    apex_has_optimizers: bool = False
    apex_has_kernels: bool = False
    """Whether the compiled extension ``amp_C`` is there."""
    transformer_engine: str | None = None
    transformer_engine_has_torch: bool = False
    resiliency_ext: str | None = None
    """Version of nvidia-resiliency-ext."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """Resources of the host, and of the control group this process is confined to."""

    cores: int
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    open_files_soft: int | None = None
    open_files_hard: int | None = None
    cgroup_memory_bytes: int | None = None
    """None also when there is no limit."""
    cgroup_cores: float | None = None
    no_quota: str | None = None
    """Why a process cannot be made slow by a quota of CPU time; None: it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Everything the doctor knows."""

    python: tuple[int, int, int]
    packages: tuple[PackageFacts, ...]
    origins: tuple[OriginFacts, ...]
    device: DeviceFacts
    patches: tuple[PatchFacts, ...] | None
    """None: the registry of patches could not be imported (``patches_error`` says why)."""
    extras: ExtrasFacts
    machine: MachineFacts
    patches_error: str = field(default="")
