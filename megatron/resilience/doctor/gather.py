"""Looks at what is installed: the part of the doctor that imports torch and Megatron.

Promise: a broken installation becomes a fact, not a traceback. Nothing is left changed.
"""

import contextlib
import importlib
import importlib.util
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from megatron.resilience.doctor.facts import (
    DeviceFacts,
    ExtrasFacts,
    Facts,
    OriginFacts,
    PackageFacts,
    PatchFacts,
)
from megatron.resilience.doctor.gather_machine import gather_machine

OWN_NAME = "resihp"
PINNED = ("torch", "megatron-core", "numpy")
UPSTREAM_MODULES = ("megatron.core", "megatron.training")


def gather() -> Facts:
    """Look at everything; takes as long as ``import torch`` and Megatron take."""
    origins = tuple(gather_origin(module) for module in UPSTREAM_MODULES)
    with _quiet():
        device = gather_device()
        patches, patches_error = _gather_patches(origins, "cuda" if device.gpu_names else "cpu")
    return Facts(
        python=sys.version_info[:3],
        packages=tuple(_package(name) for name in PINNED),
        origins=origins,
        device=device,
        patches=patches,
        patches_error=patches_error,
        extras=_gather_extras(has_gpu=bool(device.gpu_names)),
        machine=gather_machine(),
    )


def gather_device() -> DeviceFacts:
    """Ask torch for GPUs and backends."""
    try:
        torch: Any = importlib.import_module("torch")
        dist: Any = importlib.import_module("torch.distributed")
    except (ImportError, OSError) as error:  # OSError: a shared library is missing
        return DeviceFacts(torch_error=str(error).strip().partition("\n")[0])
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    nccl = bool(dist.is_nccl_available())
    return DeviceFacts(
        gpu_names=tuple(torch.cuda.get_device_name(index) for index in range(count)),
        cuda_build=torch.version.cuda,
        nvidia_device_files=tuple(str(path) for path in sorted(Path("/dev").glob("nvidia[0-9]*"))),
        gloo=bool(dist.is_gloo_available()),
        nccl=nccl,
        nccl_version=tuple(torch.cuda.nccl.version()) if nccl and count else None,
        nccl_package=_nccl_package(),
    )


def gather_origin(module: str) -> OriginFacts:
    """Find, without importing it, the folder that ``module`` would be imported from."""
    try:
        spec = importlib.util.find_spec(module)
    except ImportError:
        spec = None
    return OriginFacts(
        module=module,
        found=str(Path(spec.origin).resolve().parent) if spec and spec.origin else None,
        expected=_wheel_folder(module),
        shadow=_namespace_breaker(),
    )


def _namespace_breaker() -> str | None:
    """Find a ``megatron/__init__.py`` beside any portion that Python could see.

    The working folder counts although this process may not search it: ``python script.py`` does.
    """
    portions = [Path(place) for place in importlib.import_module("megatron").__path__]
    searched = [Path(place) / "megatron" for place in [*sys.path, str(Path.cwd())]]
    for folder in [*portions, *searched]:
        if (folder / "__init__.py").is_file():
            return str((folder / "__init__.py").resolve())
    return None


def _wheel_folder(module: str) -> str | None:
    try:
        wheel = metadata.distribution("megatron-core")
    except metadata.PackageNotFoundError:
        return None
    return str(Path(str(wheel.locate_file(module.replace(".", "/")))).resolve())


def _package(name: str) -> PackageFacts:
    return PackageFacts(name=name, installed=_version(name), wanted=_wanted(name))


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _wanted(name: str) -> str | None:
    try:
        lines = metadata.requires(OWN_NAME) or []
    except metadata.PackageNotFoundError:
        return None
    requirements = [Requirement(line) for line in lines]
    ranges = [str(each.specifier) for each in requirements if each.name == name]
    return ranges[0] if ranges else None


def _nccl_package() -> str | None:
    for wheel in metadata.distributions():
        name = wheel.name or ""
        if name.startswith("nvidia-nccl"):
            return f"{name} {wheel.version}"
    return None


def _gather_patches(
    origins: Sequence[OriginFacts], device: str
) -> tuple[tuple[PatchFacts, ...] | None, str]:
    if any(origin.shadow or origin.found != origin.expected for origin in origins):
        return None, "another Megatron shadows the installed one"  # and could fail in any way
    try:
        registry: Any = importlib.import_module("megatron.resilience.patches.registry")
    except ImportError as error:
        return None, str(error)
    found = tuple(
        PatchFacts(symbol=each.symbol, status=each.status, detail=each.detail)
        for each in registry.report(device)
    )
    return found, ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Upstream warns a dozen times about optional packages; the report says it once."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _gather_extras(*, has_gpu: bool) -> ExtrasFacts:
    # Looked up, never imported: a namesake of Apex may run anything on import.
    spec = importlib.util.find_spec("apex")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return ExtrasFacts(
        has_gpu=has_gpu,
        apex_folder=str(folders[0]) if folders else spec.origin if spec else None,
        apex_has_optimizers=any((folder / "optimizers").is_dir() for folder in folders),
        apex_has_kernels=importlib.util.find_spec("amp_C") is not None,
        transformer_engine=_version("transformer-engine"),
        transformer_engine_has_torch=importlib.util.find_spec("transformer_engine_torch")
        is not None,
        resiliency_ext=_version("nvidia-resiliency-ext"),
    )
