"""Receipts, plans and events of changes: what happened to the job, and how long each part took.

Every rank times its own phases; the lowest rank of the members writes.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from megatron.resilience.executor.transition import Phases
from megatron.resilience.faults.struck import fault_behind
from resihp_ext.control import messages as say
from resihp_ext.detector.say import plan_line
from resihp_ext.events import Event, EventLog
from resihp_ext.plan.plan import Plan


class Journal:
    """One rank's records."""

    def __init__(self, folder: Path, events: EventLog | None, rank: int) -> None:
        """Prepares the records.

        Args:
            folder: Where ``plans/`` and ``receipts/`` are kept.
            rank: This rank.
        """
        self._folder = folder
        self._events = events
        self._rank = rank
        self.writes = rank == 0
        """Whether this rank is the one that writes."""
        self._losses: tuple[say.Loss, ...] = ()
        self._last_s = time.time()
        """When the last loss was noticed, or this rank began; seconds since the epoch."""
        self._open: tuple[Path, dict[str, Any]] | None = None
        self._phases: Phases | None = None
        """Of the recovery that the open receipt is of."""
        self.recovered_s: float | None = None
        """Of the last recovery, until somebody takes it."""
        self._normal_s: dict[str, float] = {}
        self._ran: Plan | None = None
        """The plan that ran last."""

    def begins(self, plan: Plan) -> None:
        """The plan that a job starts with."""
        self._ran = plan

    def lost(self, view: say.View, *, heard_s: float, phases: Phases) -> None:
        """Somebody is lost: the recovery begins, or begins again."""
        self._losses, self._phases = view.losses, phases
        self.writes = self._rank == min(view.members)
        seen_s = min((loss.time_s for loss in view.losses), default=0.0)
        if seen_s and "detect" not in phases.seconds:
            heard_wall_s = time.time() - (time.perf_counter() - heard_s)
            phases.seconds["detect"] = max(0.0, heard_wall_s - seen_s)
            phases.seconds["abort"] = time.perf_counter() - heard_s

    def changed(self, plan: Plan, receipt: dict[str, Any]) -> None:
        """A change of layout is done."""
        losses, self._losses = self._losses, ()
        before, self._ran = self._ran, plan
        first = min(losses, key=lambda loss: loss.time_s, default=None)
        earlier_s = self._last_s
        self._open = None  # what is repeated from here on is of this change, whoever writes it
        if before is not None:
            # Attempts in between that were broken off are no layouts that the job had.
            receipt["from_version"], receipt["from_plan"] = before.version, before.digest
        if first is not None:
            self._last_s = max(loss.time_s for loss in losses)
            self.recovered_s = max(0.0, time.time() - first.time_s)
        if not self.writes:
            return
        receipt["losses"] = [
            {"rank": loss.rank, "cause": loss.cause, "time_s": loss.time_s} for loss in losses
        ]
        if first is not None:
            self._blame(receipt, first, earlier_s)
        receipt["resumed_s"] = time.time()
        write_whole(self._folder / "plans" / f"{plan.version:03d}.json", plan.to_json())
        path = free_receipt(self._folder)
        self._write(path, receipt)
        if losses:
            self._open = path, receipt
        _tell(receipt)
        if before is not None and _speeds(before) != _speeds(plan):
            line = plan_line(receipt["step"] + 1, before, plan, receipt["reason"])
            print(line, flush=True)  # noqa: T201 - a line for people
        if self._events is not None:
            short = ("from_version", "to_version", "total_s", "moved_bytes", "reason")
            fields = {name: receipt[name] for name in short}
            number = int(path.stem)
            self._events.write(Event.TRANSITION, step=receipt["step"], receipt=number, **fields)

    def _blame(self, receipt: dict[str, Any], first: say.Loss, earlier_s: float) -> None:
        """Adds the fault on purpose behind the first loss, and how long nobody knew of it."""
        faults = self._folder / "faults"
        fault = fault_behind(faults, first.rank, after_s=earlier_s, seen_s=first.time_s)
        if fault is not None:
            receipt["fault"] = fault
            notice_s = first.time_s - fault["time_s"]
            receipt["phases_s"] = {"notice": notice_s, **receipt["phases_s"]}

    def paced(self, phase: str, seconds: float) -> None:
        """How long a stretch of work takes when nothing happens."""
        self._normal_s[phase] = seconds

    def repeated(self, seconds: float, *, ends: bool) -> None:
        """The work that a failure had broken off is done again."""
        if self._open is None:
            return
        path, receipt = self._open
        times = receipt["phases_s"]
        if "repeat" not in times and self._phases is not None:
            # Receipts are written, the coordinator is told, data are fetched once more.
            idle_s = time.perf_counter() - seconds - self._phases.ended_s
            times["resume"] = max(0.0, idle_s - times.get("catch_up", 0.0))
        times["repeat"] = times.get("repeat", 0.0) + seconds
        receipt["repeated_s"] = time.time()
        receipt["redone_steps"] += 1
        self._write(path, receipt)
        if ends:
            self._open = None

    def caught_up(self, steps: int, seconds: float) -> None:
        """Steps were done again from an older state."""
        if self._open is not None:
            path, receipt = self._open
            receipt["phases_s"]["catch_up"] = seconds
            receipt["redone_steps"] = steps
            self._write(path, receipt)

    def _write(self, path: Path, receipt: dict[str, Any]) -> None:
        write_whole(path, json.dumps(receipt, indent=1))


def _speeds(plan: Plan) -> dict[int, float]:
    """Of devices that are alive and slow."""
    return {one.rank: one.p for one in plan.devices if 0 < one.p < 1}


def _tell(receipt: dict[str, Any]) -> None:
    print(  # noqa: T201 - a line for people
        f"resihp: step {receipt['step']}: plan {receipt['from_version']} to "
        f"{receipt['to_version']} in {receipt['total_s']:.2f} s, "
        f"{receipt['moved_bytes'] / 2**20:.1f} MiB moved, "
        f"{len(receipt['ranks_with_new_modules'])} ranks with new modules: {receipt['reason']}",
        flush=True,
    )


def free_receipt(folder: Path) -> Path:
    """Where the next receipt goes; numbers go on when a job is resumed."""
    numbers = [int(path.stem) for path in (folder / "receipts").glob("[0-9]*.json")]
    return folder / "receipts" / f"{max(numbers, default=-1) + 1:03d}.json"


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    os.replace(part, path)
