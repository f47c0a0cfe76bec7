"""What tests of slow processes share: whether this machine has quotas, and what is left of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from resihp_ext.brake.cpu_group import why_not
from resihp_ext.brake.cpu_tree import find_cpu_tree

_WHY_NOT = why_not(find_cpu_tree(), os.getpid())
needs_quota = pytest.mark.skipif(_WHY_NOT is not None, reason=f"no quota of CPU time: {_WHY_NOT}")


def groups_of(launcher_pid: int) -> list[Path]:
    """The control groups of a launcher: the job's, and those in it."""
    tree = find_cpu_tree()
    job = None if tree is None else tree.own / f"resihp-{launcher_pid}"
    if job is None or not job.exists():
        return []
    return [job, *(one for one in job.iterdir() if one.is_dir())]
