"""What the folder of a run says of it: iterations, changes, plans, decisions. Reads, draws nothing.

Real and simulated runs keep the same files. A folder may be damaged, or belong to a run that goes
on: what can be read counts, and what could not is told.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from resihp_ext.errors import UserError
from resihp_ext.events import Event, read_events
from resihp_ext.plan.parts import PlanError
from resihp_ext.plan.plan import Plan

Entry = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One that counts: of steps that were done again the last one."""

    step: int
    end_s: float
    """Since the run began."""
    seconds: float
    """Since the iteration before it ended; NaN where that is not known."""
    loss: float
    tokens: int
    """0: not known."""


@dataclass(kw_only=True)
class Run:
    """Everything in a folder."""

    folder: Path
    events: list[Entry] = field(repr=False)
    receipts: list[Entry] = field(repr=False)
    plans: dict[int, Plan] = field(repr=False)
    notes: list[str]
    """What could not be read."""

    @cached_property
    def begin_s(self) -> float:
        """When the first event was written."""
        return min((float(one["time_s"]) for one in self.events), default=0.0)

    @cached_property
    def end_s(self) -> float:
        """When the last event was written, since the run began."""
        return max((float(one["time_s"]) for one in self.events), default=0.0) - self.begin_s

    @property
    def badges(self) -> list[str]:
        """What is to be known before any figure is read."""
        starts = self.named(Event.JOB_START)
        if any(one.get("source") == "simulated" for one in starts):
            return ["simulated"]
        return ["emulated devices"] if any(one.get("emulated") for one in starts) else []

    def named(self, event: str) -> list[Entry]:
        """Events of a kind, in the order in which they were written."""
        return [one for one in self.events if one["event"] == event]

    def at_s(self, entry: Entry) -> float:
        """When an event was written, since the run began."""
        return float(entry["time_s"]) - self.begin_s

    @cached_property
    def iterations(self) -> list[Iteration]:
        """In ascending order of steps."""
        tokens: dict[int, dict[int, int]] = defaultdict(dict)
        for one in self.named(Event.MICRO_BATCHES):
            found = sum(int(m.get("tokens", 0)) for m in one.get("micro_batches") or ())
            tokens[int(one["step"])][int(one.get("replica") or one.get("rank") or 0)] = found
        ends = {int(one["step"]): one for one in self.named(Event.ITERATION)}
        last_s, found_all = math.nan, []
        for step in sorted(ends):
            one = ends[step]
            end_s = self.at_s(one)
            count = int(one.get("tokens") or sum(tokens[step].values()))
            seconds = end_s - last_s if end_s > last_s else math.nan
            found_all.append(
                Iteration(step=step, end_s=end_s, seconds=seconds, loss=_loss(one), tokens=count)
            )
            last_s = end_s
        return found_all

    def plan_at(self, step: int) -> Plan | None:
        """The plan that a step ran on."""
        version = min(self.plans, default=0)
        for one in self.receipts:
            if int(one["step"]) < step:
                version = int(one["to_version"])
        return self.plans.get(version)


def read_run(folder: Path) -> Run:
    """Reads a folder.

    Args:
        folder: ``--resilience-dir`` of a job, or what ``resihp simulate --out`` has written.

    Raises:
        UserError: there is no run in it.
    """
    path = folder / "events.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the --resilience-dir of a job")
    try:
        lines = sum(1 for line in path.read_text(errors="replace").splitlines() if line.strip())
        events = [one for one in read_events(path) if _is_number(one.get("time_s"))]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from error
    if not events:
        raise UserError(f"{path}: no events in it; has the job begun?")
    notes = []
    if lines > len(events):
        notes.append(f"{lines - len(events)} of {lines} lines of events.jsonl could not be read.")
    receipts = _objects(folder / "receipts", ("step", "from_version", "to_version"), notes)
    return Run(
        folder=folder, events=events, receipts=receipts, plans=_plans(folder, notes), notes=notes
    )


def _objects(folder: Path, wanted: Sequence[str], notes: list[str]) -> list[Entry]:
    found = []
    for path in sorted(folder.glob("[0-9]*.json")):
        try:
            one = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            one = None
        if isinstance(one, dict) and all(isinstance(one.get(key), int) for key in wanted):
            found.append(one)
        else:
            notes.append(f"{folder.name}/{path.name} could not be read.")
    return found


def _plans(folder: Path, notes: list[str]) -> dict[int, Plan]:
    plans = {}
    for path in sorted((folder / "plans").glob("[0-9]*.json")):
        try:
            plans[int(path.stem)] = Plan.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, PlanError):
            notes.append(f"plans/{path.name} could not be read.")
    return plans


def _loss(entry: Entry) -> float:
    losses = entry.get("losses")
    values = [v for v in losses.values() if _is_number(v)] if isinstance(losses, dict) else []
    return float(values[0]) if values else math.nan


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
