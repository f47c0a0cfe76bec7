"""Reads the host's resources and the limits of this process's control group (v2 or v1)."""

import os
import resource
from pathlib import Path

from megatron.resilience.doctor.facts import MachineFacts
from resihp_ext.brake.cpu_group import why_not
from resihp_ext.brake.cpu_tree import find_cpu_tree

CGROUP_ROOT = Path("/sys/fs/cgroup")

V1_UNLIMITED_BYTES = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


def gather_machine() -> MachineFacts:
    """Look at this host; what cannot be read is None."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shm_bytes=_shm_bytes(),
        open_files_soft=None if soft == resource.RLIM_INFINITY else soft,
        open_files_hard=None if hard == resource.RLIM_INFINITY else hard,
        cgroup_memory_bytes=cgroup_memory_bytes(CGROUP_ROOT, _own_cgroup()),
        cgroup_cores=cgroup_cores(CGROUP_ROOT, _own_cgroup()),
        no_quota=why_not(find_cpu_tree(), os.getpid()),
    )


def cgroup_memory_bytes(root: Path, own: str) -> int | None:
    """Least memory limit on the way from ``root`` down to the group ``own`` (like ``/a/b``)."""
    limits = [int(text) for text in _values(root, own, "memory.max") if text.isdigit()]
    version_1 = _read(root / "memory" / "memory.limit_in_bytes")
    if version_1 is not None and version_1.isdigit() and int(version_1) < V1_UNLIMITED_BYTES:
        limits.append(int(version_1))
    return min(limits, default=None)


def cgroup_cores(root: Path, own: str) -> float | None:
    """Least CPU quota on the way from ``root`` down to ``own``, in cores."""
    quotas = [text.split() for text in _values(root, own, "cpu.max")]
    cores = [int(quota) / int(period) for quota, period in quotas if quota != "max"]
    quota = _read(root / "cpu" / "cpu.cfs_quota_us")
    period = _read(root / "cpu" / "cpu.cfs_period_us")
    if quota is not None and period is not None and int(quota) > 0:
        cores.append(int(quota) / int(period))
    return min(cores, default=None)


def _values(root: Path, own: str, name: str) -> list[str]:
    # Inside a container the path may name a group of the host that is not visible: then only the
    # root has the file, and that is the container's own group.
    folders = [root]
    for part in own.strip("/").split("/"):
        folders.append(folders[-1] / part)
    texts = [_read(folder / name) for folder in dict.fromkeys(folders)]
    return [text for text in texts if text]


def _own_cgroup() -> str:
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        if line.startswith("0::"):  # version 2 has exactly this one line
            return line.removeprefix("0::")
    return "/"


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _shm_bytes() -> int | None:
    try:
        shm = os.statvfs("/dev/shm")
    except OSError:
        return None
    return shm.f_frsize * shm.f_blocks
