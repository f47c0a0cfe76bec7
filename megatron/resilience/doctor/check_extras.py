"""Optional packages: used when they are there, and never confused with namesakes."""

from megatron.resilience.doctor.facts import ExtrasFacts
from megatron.resilience.doctor.finding import Finding, info, ok, warn


def check_extras(extras: ExtrasFacts) -> list[Finding]:
    """Apex, Transformer Engine, nvidia-resiliency-ext."""
    return [_apex(extras), _transformer_engine(extras), _resiliency_ext(extras)]


def _apex(extras: ExtrasFacts) -> Finding:
    if extras.apex_folder is None:
        return info("apex", "absent; torch's own optimizers are used")
    if not extras.apex_has_optimizers:
        return warn(
            "apex",
            f"{extras.apex_folder} is not NVIDIA's Apex: the PyPI project of that name is an "
            "unrelated package",
            "pip uninstall apex (NVIDIA's is built from github.com/NVIDIA/apex)",
        )
    if not extras.apex_has_kernels:
        return warn(
            "apex",
            f"{extras.apex_folder} has no compiled kernels (amp_C)",
            "rebuild Apex with --cuda_ext, or uninstall it",
        )
    return ok("apex", extras.apex_folder)


def _transformer_engine(extras: ExtrasFacts) -> Finding:
    version = extras.transformer_engine
    if version is None:
        absent = "absent; --transformer-impl local is used"
        if extras.has_gpu:
            return warn("transformer engine", absent, "pip install 'resihp[gpu]'")
        return info("transformer engine", absent)
    if not extras.transformer_engine_has_torch:
        return warn(
            "transformer engine",
            f"{version} without its torch extension",
            "pip install 'transformer-engine[pytorch]'",
        )
    return ok("transformer engine", version)


def _resiliency_ext(extras: ExtrasFacts) -> Finding:
    if extras.resiliency_ext is None:
        return info("nvidia-resiliency-ext", "absent; not needed")
    return ok("nvidia-resiliency-ext", f"{extras.resiliency_ext} (optional)")
