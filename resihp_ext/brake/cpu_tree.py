"""Where this machine keeps its control groups for CPU time: version 1 or 2 of cgroups.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MOUNTS, GROUPS = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTree:
    """The hierarchy of the CPU controller, and the place of one process in it."""

    version: int
    """1 or 2."""
    top: Path
    """Where it is mounted."""
    own: Path
    """Folder of the process's group."""


def find_cpu_tree(mounts: Path = MOUNTS, groups: Path = GROUPS) -> CpuTree | None:
    """Looks for the hierarchy and for this process in it; None where there is none.

    Args:
        mounts: ``mountinfo`` of the process.
        groups: ``cgroup`` of the process.
    """
    try:
        places, found = groups.read_text(), list(_mounts(mounts.read_text()))
    except OSError:
        return None
    for version, root, top in found:
        own = _folder(top, root, _own(places, version))
        if version == 1 or "cpu" in words(own / "cgroup.controllers"):
            return CpuTree(version=version, top=top, own=own)
    return None


def _mounts(text: str) -> Iterator[tuple[int, str, Path]]:
    """Version, root in the hierarchy, and place of each mount that may have the CPU controller."""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options) = before.split(), (after.split() + 3 * [""])[:3]
        if kind == "cgroup2":
            yield 2, fields[3], Path(fields[4])
        elif kind == "cgroup" and "cpu" in options.split(","):
            yield 1, fields[3], Path(fields[4])


def _own(places: str, version: int) -> str:
    for line in places.splitlines():
        number, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(",") if version == 1 else number == "0":
            return path
    return "/"


def _folder(top: Path, root: str, path: str) -> Path:
    # In a container the path may be the host's, which is not mounted: then the top is its own.
    below = path.removeprefix(root) if root != "/" else path
    folder = top / below.strip("/")
    return folder if ".." not in folder.parts and os.path.isdir(folder) else top


def words(path: Path) -> list[str]:
    """Of a file of the hierarchy; none where it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []
