"""What ``resihp top`` knows of a job at a moment: its status, and what its folder says of it.

The coordinator is asked; plan, events and receipts are read from the job's directory, where they
may be missing or be written just now: what cannot be read is left out. Imports neither torch nor
Megatron.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resihp_ext.commands.job import RunningJob
from resihp_ext.commands.receipts import Receipt, read_plan
from resihp_ext.events import Event, read_tail
from resihp_ext.plan.plan import Plan

TAIL_BYTES = 1 << 18
"""Of ``events.jsonl`` that are read for every look."""
MANY = (Event.MICRO_BATCHES, Event.STEP_TIMES)
"""Of several ranks in every step: they would leave no room for what has happened."""
RECEIPTS = 5
"""Of which the latest are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One look at a job."""

    status: Mapping[str, Any]
    """As ``RunningJob.status`` gives it."""
    at_s: float
    """When, in seconds since the epoch."""
    host: str = ""
    """Node that hosts the coordinator."""
    place: str = ""
    """Where that listens."""
    plan: Plan | None = None
    """That runs, if the directory has it."""
    events: Sequence[Mapping[str, Any]] = ()
    """The latest of ``events.jsonl``, workload and times left out."""
    receipts: Mapping[int, Receipt] = field(default_factory=dict)
    """The latest, by number."""


class Watcher:
    """Looks at a job again and again; keeps what does not change."""

    def __init__(self, job: RunningJob) -> None:
        self._job = job
        self._plan: Plan | None = None

    def look(self) -> Look:
        """Asks the coordinator and reads the directory.

        Raises:
            UserError, JobOverError, UnreachableError: as ``RunningJob.status``.
        """
        status, where = self._job.status(), self._job.where
        return Look(
            status=status,
            at_s=time.time(),
            host=where.node,
            place=f"{where.address}:{where.port}",
            plan=self._plan_of(status.get("plan")),
            events=latest_events(self._job.directory),
            receipts=dict(latest_receipts(self._job.directory)),
        )

    def _plan_of(self, version: int | None) -> Plan | None:
        if version is None:
            return None
        if self._plan is None or self._plan.version != version:
            self._plan = read_plan(self._job.directory, version)
        return self._plan


def latest_events(directory: Path) -> list[dict[str, Any]]:
    """Events of the job that runs, without what each step worked on and how long it took."""
    try:
        found = read_tail(directory / "events.jsonl", TAIL_BYTES)
    except OSError:
        return []
    starts = [k for k, one in enumerate(found) if one["event"] == Event.JOB_START]
    # An earlier job may have had the same directory.
    found = found[starts[-1] :] if starts else found
    return [one for one in found if one["event"] not in MANY]


def latest_receipts(directory: Path) -> Iterator[tuple[int, Receipt]]:
    """The last ones, by number."""
    paths = sorted((directory / "receipts").glob("[0-9]*.json"), key=lambda path: int(path.stem))
    for path in paths[-RECEIPTS:]:
        with contextlib.suppress(OSError, ValueError):
            receipt = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(receipt, dict):
                yield int(path.stem), receipt
