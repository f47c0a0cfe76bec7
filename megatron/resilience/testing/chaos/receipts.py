"""Receipts of a job: whether they are complete, and how long the first recovery took."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from megatron.resilience.faults.struck import Strike, read_strike
from megatron.resilience.testing.chaos.ledger import Ledger
from resihp_ext.errors import ResiHPError
from resihp_ext.faults.fault import Kind, Phase
from resihp_ext.plan.plan import Plan

_KEYS = {
    "reason",
    "step",
    "from_version",
    "to_version",
    "from_plan",
    "to_plan",
    "phases_s",
    "total_s",
    "moved_bytes",
    "lower_bound_bytes",
    "messages",
    "state_digests",
    "ranks_with_new_modules",
    "redone_steps",
    "losses",
    "resumed_s",
}
_IN_A_STEP = {Phase.FORWARD, Phase.BACKWARD, Phase.P2P, Phase.SYNC, Phase.VOTE}


def strikes(folder: Path) -> list[Strike]:
    """What has struck of the job's list, in order of time."""
    paths = (folder / "faults").glob("[0-9]*.done")
    found = [one for path in paths if (one := read_strike(path)) is not None]
    return sorted(found, key=lambda one: (one.time_s, one.name))


def read_receipts(folder: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """All receipts, and what is wrong with them."""
    found, problems = [], []
    version = 0
    for number, path in enumerate(sorted((folder / "receipts").glob("*.json"))):
        receipt = json.loads(path.read_text())
        found.append(receipt)
        problems += [f"receipt {path.name}: {text}" for text in _wrong(receipt, folder, version)]
        if int(path.stem) != number:
            problems.append(f"receipt {path.name}: expected number {number}")
        version = receipt.get("to_version", version)
    return found, problems


def _wrong(receipt: dict[str, Any], folder: Path, version: int) -> list[str]:
    missing = _KEYS - receipt.keys()
    if missing:
        return [f"lacks {sorted(missing)}"]
    wrong = []
    if receipt["from_version"] != version or receipt["to_version"] <= version:
        wrong.append(
            f"from plan {receipt['from_version']} to {receipt['to_version']}, after {version}"
        )
    seconds = receipt["phases_s"].values()
    if not all(math.isfinite(one) and one >= 0.0 for one in seconds) or not seconds:
        wrong.append(f"phases {receipt['phases_s']}")
    path = folder / "plans" / f"{receipt['to_version']:03d}.json"
    try:
        digest = Plan.from_json(path.read_text()).digest
    except (OSError, ValueError, ResiHPError) as error:
        return [*wrong, f"{path.name}: {error}"]
    if digest != receipt["to_plan"]:
        wrong.append(f"{path.name} is another plan")
    if not receipt["state_digests"] or receipt["moved_bytes"] < 0:
        wrong.append("no proof of the state")
    return wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """From a kill to the end of the step that it had interrupted."""

    recovery_s: float
    """Without the time that the step takes anyway."""
    notice_s: float
    """Until the coordinator knew; most of it is what the system takes to end a process."""
    phases_error: float
    """How far the receipt's phases are from adding up, as a part of all from the kill on."""
    phases_error_from_notice: float
    """The same from when the coordinator knew: without the first phase."""
    phases_s: dict[str, float]


def first_recovery(
    struck: list[Strike], receipts: list[dict[str, Any]], ledger: Ledger
) -> Recovery | None:
    """Of the first fault of a run, if it was a kill in a step and nothing else came before its
    end."""
    if not struck or not receipts:
        return None
    first, receipt = struck[0], receipts[0]
    fits = first.fault.kind is Kind.KILL and first.phase in _IN_A_STEP
    losses = receipt.get("losses", ())
    alone = [one["rank"] for one in losses] == [first.fault.rank]
    done_s = ledger.ended_s.get(receipt.get("step", 0) + 1, 0.0)
    if not (fits and alone and done_s > first.time_s and "repeated_s" in receipt):
        return None
    if len(struck) > 1 and struck[1].time_s < done_s:
        return None
    times = sorted(ledger.ended_s.values())
    normal_s = median(b - a for a, b in pairwise(times))
    phases_s = receipt["phases_s"]
    known = {name: seconds for name, seconds in phases_s.items() if name != "notice"}
    known_s = receipt["repeated_s"] - losses[0]["time_s"]
    whole_s = receipt["repeated_s"] - first.time_s
    return Recovery(
        recovery_s=done_s - first.time_s - normal_s,
        notice_s=losses[0]["time_s"] - first.time_s,
        phases_error=abs(sum(phases_s.values()) - whole_s) / whole_s,
        phases_error_from_notice=abs(sum(known.values()) - known_s) / known_s,
        phases_s=phases_s,
    )
