"""A job's control groups: one for each launcher, below it one for each process that is held back.

    resihp-LAUNCHER_PID/RANK.PID

A process that is killed leaves its group behind; the launcher removes what is left at the end, and
at its start what launchers that are gone have left. An empty group takes nobody's time.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterable
from pathlib import Path

from resihp_ext.brake.cpu_tree import CpuTree, find_cpu_tree, words
from resihp_ext.errors import ResiHPError

logger = logging.getLogger(__name__)

_JOB = re.compile(r"resihp-(\d+)")
_TRIES = 5
"""Another process may remove the job's group, which was empty, just before ours is made in it."""
_EMPTY_S = 2.0
"""How long killed processes may take to leave their group."""
_WEIGHT = {1: ("cpu.shares", 1024, 262_144), 2: ("cpu.weight", 100, 10_000)}
"""File, what one process counts, and the most, of each version."""
PERIOD_US = 5_000
"""Of the quota. Shorter than the actions of a step, which are all to be slow: measured with periods
of 100 ms, 20 ms of work are done at full speed and the next at none."""
_LEAST_US = 1_000
"""Shorter quotas and periods are refused by Linux."""


class BrakeError(ResiHPError):
    """This machine does not let a process be held back like that."""


NO_TREE = "no control group with the CPU controller is mounted here"


class CpuGroup:
    """The group of one process; made at once, and left and removed by :meth:`close`."""

    def __init__(self, tree: CpuTree, launcher_pid: int, name: str) -> None:
        """Makes it.

        Args:
            tree: As this process finds it before it is moved.
            name: Of the process, among those of its launcher.

        Raises:
            BrakeError: it cannot be made; says where and why.
        """
        self._tree = tree
        self._job = tree.own / f"resihp-{launcher_pid}"
        self.folder = self._job / name
        try:
            self._make()
        except OSError as error:
            self._remove()
            raise BrakeError(f"{self.folder}: {error.strerror}") from error

    def _make(self) -> None:
        for attempt in range(_TRIES):
            try:
                self._job.mkdir(exist_ok=True)
                if self._tree.version == 2:
                    self._delegate()
                self.folder.mkdir(exist_ok=True)
                break
            except FileNotFoundError:
                if attempt == _TRIES - 1:
                    raise
        if self._tree.version == 2:
            _write(self.folder / "cgroup.type", "threaded")
        # To the scheduler a group is one: let it count as much as what is in it would alone.
        file, each, most = _WEIGHT[self._tree.version]
        _write(self._job / file, min(each * len(_folders(self._job)), most))

    def _delegate(self) -> None:
        # Only in a threaded subtree may processes and groups be in one group.
        _write(self._job / "cgroup.type", "threaded")
        for folder in (self._tree.own, self._job):
            _write(folder / "cgroup.subtree_control", "+cpu")

    def limit(self, cores: float) -> None:
        """Lets the processes in it have the time of so many cores, all together.

        Raises:
            BrakeError: the system refuses it.
        """
        period = max(PERIOD_US, round(_LEAST_US / cores))
        quota = max(round(period * cores), _LEAST_US)
        try:
            if self._tree.version == 2:
                _write(self.folder / "cpu.max", f"{quota} {period}")
            else:
                _write(self.folder / "cpu.cfs_quota_us", -1)
                _write(self.folder / "cpu.cfs_period_us", period)
                _write(self.folder / "cpu.cfs_quota_us", quota)
        except OSError as error:
            raise BrakeError(f"{self.folder}: a quota of {cores:g} cores: {error}") from error

    def enter(self, pid: int) -> None:
        """Takes a process in, with all its threads and what it starts from now on.

        Raises:
            BrakeError: the system refuses it.
        """
        try:
            _write(self.folder / "cgroup.procs", pid)
        except OSError as error:
            raise BrakeError(f"{self.folder}: {error.strerror}") from error

    def close(self) -> None:
        """Lets all that are in it go, and removes it; what is left is the launcher's to remove."""
        members = "cgroup.procs" if self._tree.version == 1 else "cgroup.threads"
        deadline_s = time.monotonic() + _EMPTY_S
        while not self._remove() and time.monotonic() < deadline_s:
            for pid in words(self.folder / members):
                with contextlib.suppress(OSError):  # it has just ended
                    _write(self._tree.own / members, pid)

    def _remove(self) -> bool:
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        with contextlib.suppress(OSError):  # others are in it
            self._job.rmdir()
        return not self.folder.exists()


def why_not(tree: CpuTree | None, launcher_pid: int) -> str | None:
    """Why this process cannot be given less time on the CPU; None when it can. Tries it."""
    if tree is None:
        return NO_TREE
    try:
        group = CpuGroup(tree, launcher_pid, f"try.{os.getpid()}")
        try:
            group.limit(0.5)
        finally:
            group.close()
    except BrakeError as error:
        return str(error)
    return None


def remove_groups(launcher_pid: int, tree: CpuTree | None = None) -> None:
    """Removes the groups of a launcher whose processes have ended, and of those that are gone."""
    tree = tree or find_cpu_tree()
    if tree is None:
        return
    for job in _folders(tree.own):
        named = _JOB.fullmatch(job.name)
        if named is None:
            continue
        pid = int(named[1])
        if pid == launcher_pid or not os.path.exists(f"/proc/{pid}"):
            _remove_all([*_folders(job), job], _EMPTY_S if pid == launcher_pid else 0.0)


def _remove_all(folders: Iterable[Path], wait_s: float) -> None:
    deadline_s = time.monotonic() + wait_s
    for folder in folders:
        while folder.exists():
            try:
                folder.rmdir()
            except FileNotFoundError:
                break
            except OSError as error:
                if time.monotonic() >= deadline_s:
                    logger.warning("%s: %s", folder, error.strerror)
                    break
                time.sleep(0.01)


def _folders(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return sorted(Path(one.path) for one in os.scandir(folder) if one.is_dir())
    return []


def _write(path: Path, value: object) -> None:
    path.write_text(str(value))
