"""A simulated run as the files that real jobs keep, for ``resihp report``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from resihp_ext.errors import UserError
from resihp_ext.plan.plan import Plan
from resihp_ext.simulator.record import Change, Record, State

MOST_ITERATIONS = 5000
"""Events of a run: of more iterations every second one, third one and so on is written."""


def write_run(found: Record, folder: Path) -> None:
    """Writes ``events.jsonl``, ``plans`` and ``receipts``.

    Raises:
        UserError: the folder cannot be written.
    """
    try:
        for name in ("plans", "receipts"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(one) for one in _events(found)]
        (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
        for version, plan in enumerate(_plans(found)):
            (folder / "plans" / f"{version:03d}.json").write_text(plan.to_json() + "\n")
        for number, receipt in enumerate(_receipts(found)):
            text = json.dumps(receipt, indent=1) + "\n"
            (folder / "receipts" / f"{number:03d}.json").write_text(text)
    except OSError as error:
        raise UserError(f"{folder}: {error.strerror}; choose another --out") from error


def _ran(found: Record) -> list[Change]:
    """Changes after which something ran."""
    return [one for one in found.changes if one.after >= 0]


def _plans(found: Record) -> Iterator[Plan]:
    """The first one, and one for every change."""
    if found.layouts:
        yield found.layouts[0].plan
    for one in _ran(found):
        yield found.layouts[one.after].plan


def _events(found: Record) -> Iterator[dict[str, Any]]:
    yield _event(0.0, 0, "job_start", source="simulated", policy=found.policy)
    every = -(-max(found.steps, 1) // MOST_ITERATIONS)
    changes = iter(enumerate(_ran(found)))
    pending = next(changes, None)
    step = 0
    for one in found.stretches:
        while pending is not None and pending[1].at_s <= one.begin_s:
            number, change = pending
            yield _event(
                change.at_s,
                change.step,
                "transition",
                receipt=number,
                from_version=number,
                to_version=number + 1,
                total_s=change.pause_s,
                moved_bytes=change.moved_bytes,
                reason=change.reason,
            )
            step = change.step
            pending = next(changes, None)
        if one.state is State.TRAIN and one.steps:
            each_s = (one.end_s - one.begin_s) / one.steps
            for at in range(one.steps):
                step += 1
                if step % every == 0:
                    tokens = found.step_tokens * every
                    yield _event(one.begin_s + (at + 1) * each_s, step, "iteration", tokens=tokens)
    yield _event(found.seconds, step, "job_end")


def _event(at_s: float, step: int, name: str, **fields: Any) -> dict[str, Any]:
    return {"time_s": round(at_s, 3), "rank": 0, "step": step, "event": name, **fields}


def _receipts(found: Record) -> Iterator[dict[str, Any]]:
    before: set[int] = set()
    for number, one in enumerate(_ran(found)):
        dead = set(one.health.dead)
        lost = sorted(dead - before)
        before = dead
        speeds = {"before_s": one.before_s, "after_s": one.after_s}
        yield {
            "reason": one.reason,
            "step": one.step,
            "from_version": number,
            "to_version": number + 1,
            "phases_s": {"pause": one.pause_s},
            "total_s": one.pause_s,
            "moved_bytes": one.moved_bytes,
            "redone_steps": one.lost_steps,
            "rewound_to_step": one.step if one.lost_steps else None,
            "source": "checkpoint" if one.lost_steps else "owners",
            "losses": [{"rank": rank, "cause": "died", "time_s": one.at_s} for rank in lost],
            "resumed_s": one.at_s + one.pause_s,
            "step_s": {name: value for name, value in speeds.items() if isfinite(value)},
        }
