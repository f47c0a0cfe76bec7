"""What a job has trained on and what came of it, step by step, from its ``events.jsonl``.

A step that was broken off and done again may have left records of both attempts. Those count that
were written under the latest plan: a plan is left only when its step was not done.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from resihp_ext.events import read_events

Samples = Counter[tuple[int, ...]]
"""How often there is a micro-batch with segments of these lengths."""


@dataclass(slots=True)
class Ledger:
    """Of one job."""

    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)
    """When each step was recorded as done."""
    samples: dict[int, Samples] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_ledger(folder: Path) -> Ledger:
    """Reads the records of a job.

    Args:
        folder: ``--resilience-dir``.
    """
    ledger = Ledger()
    try:
        events = read_events(folder / "events.jsonl")
    except OSError as error:
        ledger.problems.append(str(error))
        return ledger
    _iterations(ledger, events)
    _samples(ledger, events)
    return ledger


def _iterations(ledger: Ledger, events: Iterable[dict[str, Any]]) -> None:
    back_to: dict[int, bool] = {}
    for event in events:
        step = event["step"]
        if event["event"] == "transition":
            # Whatever was done after this step is done once more.
            back_to = {one: one > step or is_back for one, is_back in back_to.items()}
        elif event["event"] == "iteration":
            if back_to.get(step) is False:
                ledger.problems.append(f"step {step} was done twice")
            back_to[step] = False
            ledger.losses[step] = event["losses"]["lm loss"]
            ledger.grad_norms[step] = event["grad_norm"]
            ledger.ended_s[step] = event["time_s"]


def _samples(ledger: Ledger, events: Iterable[dict[str, Any]]) -> None:
    records: dict[int, dict[int, dict[int, Samples]]] = {}
    for event in events:
        if event["event"] == "micro_batches":
            versions = records.setdefault(event["step"], {})
            replicas = versions.setdefault(event.get("plan", 0), {})
            found = Counter(tuple(one["segments"]) for one in event["micro_batches"])
            replicas[event["replica"]] = found
    for step, versions in records.items():
        latest = versions[max(versions)]
        ledger.samples[step] = sum(latest.values(), Counter())


def compare(found: Ledger, reference: Ledger, steps: int) -> list[str]:
    """What does not agree: steps that are missing, samples that are others."""
    problems = list(found.problems)
    wanted = set(range(1, steps + 1))
    for name, have in (("iteration", found.losses), ("micro_batches", found.samples)):
        missing, strange = sorted(wanted - have.keys()), sorted(have.keys() - wanted)
        if missing:
            problems.append(f"no {name} of steps {missing}")
        if strange:
            problems.append(f"{name} of steps {strange}")
    for step in sorted(wanted & found.samples.keys()):
        here, there = found.samples[step], reference.samples.get(step, Counter())
        if here != there:
            lacking, more = list((there - here).elements()), list((here - there).elements())
            problems.append(f"step {step}: lacks samples {lacking[:2]}, has {more[:2]} too many")
    return problems


def differences(found: dict[int, float], reference: dict[int, float]) -> float:
    """The largest relative difference over the steps that both have."""
    both = found.keys() & reference.keys()
    return max(
        (abs(found[step] - reference[step]) / abs(reference[step]) for step in both), default=0.0
    )
