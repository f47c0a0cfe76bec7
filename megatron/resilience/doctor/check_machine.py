"""Cores, memory, shared memory, open files, and what a control group leaves of them."""

from megatron.resilience.doctor.facts import MachineFacts
from megatron.resilience.doctor.finding import Finding, info, ok, warn

GIB = 1024**3

LEAST_CORES = 2.0
LEAST_MEMORY_BYTES = 8 * GIB
"""Eight CPU ranks of the demo need about 6 GiB."""
LEAST_SHM_BYTES = GIB
"""Containers default to 64 MiB, on which data loaders and NCCL fail with a bus error."""
LEAST_OPEN_FILES = 4096
"""Every rank holds sockets to every peer in every group; 1024 runs out at about 100 ranks."""


def check_machine(machine: MachineFacts) -> list[Finding]:
    """What the host has, or what a control group leaves of it, whichever is less."""
    return [
        _cores(machine),
        _memory(machine),
        _shm(machine),
        _open_files(machine),
        _slow_faults(machine),
    ]


def _cores(machine: MachineFacts) -> Finding:
    cores, source = float(machine.cores), ""
    if machine.cgroup_cores is not None and machine.cgroup_cores < cores:
        cores, source = machine.cgroup_cores, f" (control group; the host has {machine.cores})"
    summary = f"{cores:g}{source}"
    if cores < LEAST_CORES:
        return warn("cores", summary, f"give the job at least {LEAST_CORES:g} cores")
    return ok("cores", summary)


def _memory(machine: MachineFacts) -> Finding:
    limits = {"host": machine.memory_bytes, "control group": machine.cgroup_memory_bytes}
    known = {name: limit for name, limit in limits.items() if limit is not None}
    if not known:
        return info("memory", "unknown")
    source = min(known, key=lambda name: known[name])
    summary = f"{_gib(known[source])} ({source})"
    if known[source] < LEAST_MEMORY_BYTES:
        return warn("memory", summary, f"use fewer ranks, or at least {_gib(LEAST_MEMORY_BYTES)}")
    return ok("memory", summary)


def _shm(machine: MachineFacts) -> Finding:
    if machine.shm_bytes is None:
        return info("shared memory", "no /dev/shm")
    summary = _gib(machine.shm_bytes)
    if machine.shm_bytes < LEAST_SHM_BYTES:
        return warn("shared memory", summary, "start the container with --ipc=host")
    return ok("shared memory", summary)


def _open_files(machine: MachineFacts) -> Finding:
    soft = machine.open_files_soft
    if soft is None:
        return ok("open files", "no limit")
    if soft >= LEAST_OPEN_FILES:
        return ok("open files", str(soft))
    hard = machine.open_files_hard
    if hard is None or hard >= LEAST_OPEN_FILES:
        return warn("open files", str(soft), f"ulimit -n {LEAST_OPEN_FILES}")
    return warn("open files", f"{soft} (hard limit {hard})", "raise nofile in limits.conf")


def _slow_faults(machine: MachineFacts) -> Finding:
    """What a test of slow devices uses here; a job does without."""
    if machine.no_quota is None:
        return info("slow faults", "by quotas of CPU time")
    return info("slow faults", f"by competing load: {machine.no_quota}")


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / GIB:.1f} GiB"
