"""Makes a process slow by giving it less time on the CPU.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import os

from resihp_ext.brake.cpu_group import NO_TREE, BrakeError, CpuGroup
from resihp_ext.brake.cpu_tree import find_cpu_tree


class CpuQuota:
    """A brake: this process keeps a part of the time that it would use while it works."""

    def __init__(self, *, launcher_pid: int, name: str, threads: int = 1) -> None:
        """Prepares it.

        Args:
            name: Of this process, among those of its launcher.
            threads: How many of its threads compute at once.
        """
        self._launcher_pid, self._name, self._threads = launcher_pid, name, threads
        self._group: CpuGroup | None = None

    def keep(self, left: float) -> None:
        """See :class:`resihp_ext.brake.brake.Brake`."""
        if left >= 1:
            if self._group is not None:
                self._group.close()
                self._group = None
            return
        if self._group is None:
            tree = find_cpu_tree()
            if tree is None:
                raise BrakeError(NO_TREE)
            self._group = CpuGroup(tree, self._launcher_pid, self._name)
        self._group.limit(left * self._threads)
        self._group.enter(os.getpid())
