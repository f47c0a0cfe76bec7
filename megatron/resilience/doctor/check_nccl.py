"""The NCCL version against the table of known bad ones."""

from megatron.resilience.doctor.facts import DeviceFacts
from megatron.resilience.doctor.finding import Finding, fail, info, ok, warn
from megatron.resilience.doctor.nccl_table import KNOWN_BAD, Affects, KnownBad


def check_nccl(device: DeviceFacts) -> Finding:
    """With a GPU the loaded library is judged; without one the package is only reported."""
    if not device.gpu_names:
        package = device.nccl_package or "no nvidia-nccl package"
        return info("nccl version", f"{package}; not used without a GPU")
    if device.nccl_version is None:
        return warn(
            "nccl version",
            "torch does not tell its NCCL version",
            "install a CUDA build of torch that has NCCL",
        )
    text = ".".join(str(part) for part in device.nccl_version)
    defect = known_defect(device.nccl_version)
    if defect is None:
        return ok("nccl version", f"{text} (not in the table of known bad versions)")
    summary = f"{text}: {defect.reason} ({defect.source})"
    if defect.affects is Affects.ABORT:
        return fail(
            "nccl version", summary, "install another nvidia-nccl version: recovery needs abort"
        )
    return warn("nccl version", summary, "nothing for this project; do not use NCCL's shrink")


def known_defect(version: tuple[int, ...]) -> KnownBad | None:
    """Return the worst table entry that covers ``version``: abort before shrink."""
    covering = [entry for entry in KNOWN_BAD if _covers(entry, version)]
    return min(covering, key=lambda entry: entry.affects is not Affects.ABORT, default=None)


def _covers(entry: KnownBad, version: tuple[int, ...]) -> bool:
    return entry.first <= version and (entry.last is None or version <= entry.last)
