"""Faults that last: which of them act on this rank in a step, and the brakes for that."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path

from megatron.resilience.faults.claims import claim
from megatron.resilience.faults.config import JobFaults
from megatron.resilience.faults.refusal import is_emulated, refusal
from megatron.resilience.faults.register import node_of
from resihp_ext.brake.brake import Brake
from resihp_ext.brake.cpu_group import BrakeError
from resihp_ext.brake.cpu_group import why_not as why_no_quota
from resihp_ext.brake.cpu_load import CpuLoad
from resihp_ext.brake.cpu_load import why_not as why_no_load
from resihp_ext.brake.cpu_quota import CpuQuota
from resihp_ext.brake.cpu_tree import find_cpu_tree
from resihp_ext.faults.fault import By, Fault, Kind
from resihp_ext.faults.lasting import Hold, device_faults, link_hold


class Brakes:
    """The brakes of one process, made when they are first needed."""

    def __init__(
        self,
        *,
        launcher_pid: int,
        rank: int,
        place: int = 0,
        threads: int = 1,
        kernel: Callable[[], Brake] | None = None,
    ) -> None:
        """Prepares them.

        Args:
            place: Of this process among those of its machine.
            threads: How many of its threads compute at once.
            kernel: Makes the brake of a process that computes on a GPU.
        """
        self._launcher_pid = launcher_pid
        self._kernel = kernel
        self._makers: dict[By, Callable[[], Brake]] = {
            By.QUOTA: lambda: CpuQuota(
                launcher_pid=launcher_pid, name=f"{rank}.{os.getpid()}", threads=threads
            ),
            By.LOAD: lambda: CpuLoad(place),
        }
        if kernel is not None:
            self._makers[By.KERNEL] = kernel
        self._made: dict[By, Brake] = {}

    def choose(self, by: By | None) -> tuple[By, str | None]:
        """What a fault is done by, and why it cannot be, if so."""
        if by is None and self._kernel is not None:
            return By.KERNEL, None
        if by in (None, By.QUOTA):
            problem = why_no_quota(find_cpu_tree(), self._launcher_pid)
            if by is By.QUOTA or problem is None:
                return By.QUOTA, problem
            return By.LOAD, why_no_load()
        if by is By.LOAD:
            return By.LOAD, why_no_load()
        if by is By.KERNEL:
            return By.KERNEL, None if self._kernel else "this process computes on the CPU"
        return By.EMULATED, "devices are not emulated (--resilience-emulate)"

    def keep(self, left: Mapping[By, float]) -> None:
        """Lets this process keep these parts of its speed, and lets go of what is not named.

        Raises:
            BrakeError: the system does not let it.
        """
        for by in self._made.keys() - left.keys():
            self._made.pop(by).keep(1.0)
        for by, part in left.items():
            if by not in self._made:
                self._made[by] = self._makers[by]()
            self._made[by].keep(part)


class Slowing:
    """The lasting faults of a job, as far as they are of this rank."""

    def __init__(
        self, *, rank: int, node: str, folder: Path, brakes: Brakes, faults: JobFaults
    ) -> None:
        """Begins with none.

        Args:
            folder: ``--resilience-dir``.
            faults: What this rank's device and messages are; emulated ones are added to it.
        """
        self._rank, self._node, self._folder = rank, node, folder
        self._brakes, self._faults = brakes, faults
        self._by: dict[Fault, By] = {}
        self._devices: list[tuple[str, Fault]] = []
        self._links: list[tuple[str, Fault]] = []
        self._left: dict[By, float] = {}
        self._claimed: set[str] = set()
        self._step = 0
        self._nodes: dict[int, str] = {}

    def add(self, name: str, fault: Fault) -> str | None:
        """Takes one in; says why this process cannot carry it out, if so."""
        emulated = self._faults.emulated
        problem = refusal(fault, emulated=emulated is not None, tagged=self._faults.tagged)
        if problem is not None:
            return problem
        if emulated is not None and is_emulated(fault):
            emulated.append(fault)
            return None
        if fault.kind is Kind.SLOW_LINK:
            self._links.append((name, fault))
            return None
        if not fault.ends_others:
            by, problem = self._brakes.choose(fault.by)
            if problem is not None:
                return f"slow by {by}: {problem}"
            self._by[fault] = by
        self._devices.append((name, fault))
        return None

    def at(self, step: int) -> None:
        """A step begins: brakes are set, if anything has changed."""
        self._step = step
        if self._links:
            self._nodes.clear()
            self._note(self._links, step)
        if not self._devices and not self._left:
            return
        acting = device_faults((one for _, one in self._devices), self._rank, self._node, step)
        ways = {self._by[one] for one in acting}
        left = {by: prod(f.factor or 1.0 for f in acting if self._by[f] is by) for by in ways}
        if left != self._left:
            self._note(self._devices, step)
            self._set(left, step)

    def link_hold(self, peer: int) -> Hold | None:
        """By how much messages to another rank are held back in this step.

        Raises:
            UserError: that rank has not been written down.
        """
        if not self._links:
            return None
        if peer not in self._nodes:
            self._nodes[peer] = node_of(self._folder, peer)
        faults = (one for _, one in self._links)
        return link_hold(faults, self._node, self._nodes[peer], self._step)

    def close(self) -> None:
        """Lets this process go."""
        self._devices, self._links = [], []
        if self._left:
            self._left = {}
            self._brakes.keep({})

    def _set(self, left: dict[By, float], step: int) -> None:
        parts = [f"{part:g} of its speed by {by}" for by, part in sorted(left.items())]
        line = f"rank {self._rank} keeps {' and '.join(parts) or 'all of its speed'}"
        try:
            self._brakes.keep(left)
        except BrakeError as error:
            line = f"rank {self._rank} cannot be made slow: {error}"
        self._left = left
        os.write(2, f"resihp: fault: {line} from step {step} on\n".encode())

    def _note(self, faults: list[tuple[str, Fault]], step: int) -> None:
        """Writes down when a fault began; whoever is first does."""
        for name, fault in faults:
            if name not in self._claimed and fault.lasts_at(step):
                self._claimed.add(name)
                claim(self._folder / "faults", name, fault, rank=self._rank, step=step)
