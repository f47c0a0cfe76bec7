"""Changes the plan of a running job when its timetable says so, and keeps the receipts."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.resilience.executor.change import Cause, Change
from megatron.resilience.executor.executor import Executor
from megatron.resilience.executor.heap import few_arenas, large_apart
from megatron.resilience.executor.modules import ModuleFactory, exempt_what_is_here
from megatron.resilience.upstream.arguments import current_args
from resihp_ext.events import Event, EventLog
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.timetable import Entry, plan_at


class TimetableDriver:
    """Looks before every step which plan is in force."""

    def __init__(
        self,
        executor: Executor,
        timetable: Sequence[Entry],
        factory: ModuleFactory,
        *,
        folder: Path,
        events: EventLog | None,
    ) -> None:
        """Prepares the driver.

        Args:
            folder: Where ``plans/`` and ``receipts/`` are kept, by rank 0.
            events: This rank's log.
        """
        self._executor = executor
        self._timetable = timetable
        self._factory = factory
        self._folder = folder
        self._events = events
        self._first = executor.seat.rank == 0
        self.receipts: list[dict[str, Any]] = []
        if executor.plan.replicas:  # a newcomer prepares with a plan that is nobody else's
            self._keep_plan(executor.plan)
        exempt_what_is_here()
        few_arenas()

    def __call__(self, models: list[torch.nn.Module]) -> None:
        """Changes the layout if the step about to begin wants another plan; collective."""
        step = int(current_args().curr_iteration)
        plan = plan_at(self._timetable, step)
        if plan.digest == self._executor.plan.digest:
            return
        with large_apart():
            cause = Cause(reason="plan schedule")
            change = Change(self._executor, plan, models, step, cause=cause)
            receipt = change.run(self._factory)
        self.receipts.append(receipt)
        self._keep_plan(plan)
        if not self._first:
            return
        number = len(self.receipts) - 1
        _write(self._folder / "receipts" / f"{number:03d}.json", json.dumps(receipt, indent=1))
        if self._events is not None:
            self._events.write(Event.TRANSITION, step=step, receipt=number, **_short(receipt))
        print(  # noqa: T201 - a line for people
            f"resihp: step {step}: plan {receipt['from_version']} to {receipt['to_version']} in "
            f"{receipt['total_s']:.2f} s, {receipt['moved_bytes'] / 2**20:.1f} MiB moved, "
            f"{len(receipt['ranks_with_new_modules'])} ranks with new modules",
            flush=True,
        )

    def _keep_plan(self, plan: Plan) -> None:
        if self._first:
            _write(self._folder / "plans" / f"{plan.version:03d}.json", plan.to_json())


def _short(receipt: dict[str, Any]) -> dict[str, Any]:
    names = ("from_version", "to_version", "total_s", "moved_bytes", "reason")
    return {name: receipt[name] for name in names}


def _write(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    os.replace(part, path)
