"""Strikes the faults of one rank when it comes to the place that they name."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from megatron.resilience.faults.acts import carry_out
from megatron.resilience.faults.claims import claim, was_done
from megatron.resilience.faults.config import JobFaults
from megatron.resilience.faults.dropped import Inbox
from megatron.resilience.faults.processes import ancestors
from megatron.resilience.faults.slowing import Brakes, Slowing
from resihp_ext.errors import UserError
from resihp_ext.faults.fault import LASTING, Fault, Kind
from resihp_ext.faults.read import read_faults

logger = logging.getLogger(__name__)

_NEVER = sys.maxsize


class Injector:
    """The faults that wait for one rank; for its main thread alone."""

    def __init__(
        self,
        faults: Sequence[Fault] | JobFaults = (),
        *,
        rank: int,
        node: str,
        folder: Path,
        agent_pid: int | None = None,
        brakes: Brakes | None = None,
    ) -> None:
        """Keeps those of ``faults`` that hit this rank and have not struck yet.

        Args:
            faults: All of the job's, in the order of its file.
            folder: ``--resilience-dir``; ``faults/`` in it is created.
            agent_pid: The launcher of this node.
            brakes: What makes this rank slow; those of a CPU unless given.

        Raises:
            UserError: the folder cannot be written or is of another list of faults; or a fault
                that this process cannot carry out.
        """
        self._rank, self._node, self._agent_pid = rank, node, agent_pid
        self._folder = folder / "faults"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self._folder}: {error.strerror}; give a writable --resilience-dir"
            ) from error
        self._inbox = Inbox(self._folder)
        self._waiting: dict[str, Fault] = {}
        told = faults if isinstance(faults, JobFaults) else JobFaults(real=tuple(faults))
        self.slowing = Slowing(
            rank=rank,
            node=node,
            folder=folder,
            brakes=brakes or Brakes(launcher_pid=agent_pid or os.getpid(), rank=rank),
            faults=told,
        )
        self._step = -1
        for number, fault in enumerate(told.real):
            self._await(f"{number:03d}", fault)
        self._first_due = self._earliest()

    def at(self, phase: str, step: int, micro_batch: int | None = None) -> None:
        """Called before every phase; nearly free when nothing waits for this rank.

        Comes back unless a fault ends this process.

        Args:
            phase: A :class:`Phase` or its value.
            step: The one that is worked on, from 1; for what is done between two steps (checkpoint,
                evaluation) the one before.
            micro_batch: In phases that have one.
        """
        if step != self._step:
            self._step = step
            self._look_for_dropped()
            self.slowing.at(step)
        if step >= self._first_due:
            self._strike_due(phase, step, micro_batch)

    def close(self) -> None:
        """Nothing strikes any more, and this rank is let go; for when it leaves the job."""
        self._waiting.clear()
        self.slowing.close()

    def _await(self, name: str, fault: Fault) -> None:
        done, problem = was_done(self._folder, name, fault), None
        lasts = fault.kind in LASTING
        if (done and not lasts) or not fault.hits(self._rank, self._node):
            return
        if lasts:
            problem = self.slowing.add(name, fault)
        elif fault.kind is Kind.NODE and self._agent_pid not in ancestors(os.getpid()):
            problem = "kind node: this process was not started by resihp-run, so has no node to end"
        if problem is not None:
            raise UserError(f"fault {name}: {problem}")
        if not lasts:
            self._waiting[name] = fault

    def _earliest(self) -> int:
        return min((fault.at_step for fault in self._waiting.values()), default=_NEVER)

    def _look_for_dropped(self) -> None:
        for name, path in self._inbox.news():
            try:
                for number, fault in enumerate(read_faults(path)):
                    self._await(f"{name}-{number}", fault)
            except UserError as error:
                # Training does not end because somebody has dropped a bad file.
                logger.warning("ignored: %s", error)
            self._first_due = self._earliest()

    def _strike_due(self, phase: str, step: int, micro_batch: int | None) -> None:
        for name, fault in list(self._waiting.items()):
            if not fault.is_due(phase, step, micro_batch):
                continue
            del self._waiting[name]
            self._first_due = self._earliest()
            place = {"rank": self._rank, "phase": str(phase), "step": step}
            if claim(self._folder, name, fault, micro_batch=micro_batch, **place):
                self._strike(name, fault, f"rank {self._rank} in step {step}, {phase}")

    def _strike(self, name: str, fault: Fault, place: str) -> None:
        later = f", {fault.delay_s:g} s from now" if fault.delay_s else ""
        line = f"resihp: fault {name}: {fault.kind} of {fault.target}, by {place}{later}\n"
        os.write(2, line.encode())  # whole, also from several ranks at once
        if not fault.delay_s:
            self._carry_out(name, fault)
            return
        timer = threading.Timer(fault.delay_s, self._carry_out, (name, fault))
        timer.daemon = True  # it is no reason to keep a process that has finished
        timer.start()

    def _carry_out(self, name: str, fault: Fault) -> None:
        carry_out(fault, agent_pid=self._agent_pid, request=self._folder / f"{name}.cut")
