"""Measured steps of a run as a Chrome trace, for Perfetto or chrome://tracing.

A process is a rank, with one thread: its actions as they were executed, and in each, where the
rank waited, a slice ``wait``. Of an action it is known how long it waited in all, not when: its
waits are drawn together, for a receive over the whole of it, else at its end. Changes of the layout
are instants over all tracks. Times are microseconds since the first step that was timed, by the
clocks of the ranks' hosts. The format: "Trace Event Format" (Google, 2016).

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from resihp_ext.detector.timed import RankStep, TimedAction
from resihp_ext.errors import UserError
from resihp_ext.events import Event, read_events
from resihp_ext.plan.action import COMPUTE, RECEIVES, SENDS, Kind

Slice = dict[str, Any]

NAMES = {
    **{kind: kind.value for kind in (*COMPUTE, Kind.SYNC, Kind.STEP)},
    **{kind: f"SEND {kind.value[1]}" for kind in SENDS},
    **{kind: f"RECV {kind.value[1]}" for kind in RECEIVES},
}
CATEGORIES = {
    **dict.fromkeys(COMPUTE, "compute"),
    **dict.fromkeys([*SENDS, *RECEIVES], "transfer"),
    Kind.SYNC: "sync",
    Kind.STEP: "step",
}


def measured_trace(directory: Path) -> dict[str, Any]:
    """The trace of everything that was timed in a run.

    Args:
        directory: Its ``--resilience-dir``.

    Raises:
        UserError: there is no such run, or nothing in it was timed.
    """
    events = _events(directory)
    steps = list(timed_steps(events))
    if not steps:
        raise UserError(
            f"{directory / 'events.jsonl'}: no times of steps; "
            "run the job with --resilience-timings-steps 1"
        )
    zero_s = min(step.begun_s for step in steps)
    ranks = sorted({step.rank for step in steps})
    slices = [*_names(ranks), *_transitions(events, zero_s)]
    for rank in ranks:
        slices += _track([step for step in steps if step.rank == rank], zero_s)
    return {"traceEvents": slices, "displayTimeUnit": "ms"}


def timed_steps(events: Iterable[Mapping[str, Any]]) -> Iterator[RankStep]:
    """What the log holds of them; what is no such record is left out."""
    for event in events:
        if event["event"] == Event.STEP_TIMES:
            try:
                yield msgspec.convert(event.get("times"), RankStep)
            except msgspec.ValidationError:
                continue


def _events(directory: Path) -> list[dict[str, Any]]:
    path = directory / "events.jsonl"
    try:
        return read_events(path)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is no text"
        raise UserError(f"{path}: {why}; give the --resilience-dir of a run") from None


def _names(ranks: Iterable[int]) -> Iterator[Slice]:
    """What tracks are called, and their order."""
    for rank in ranks:
        about = {"ph": "M", "pid": rank, "tid": 0}
        yield {**about, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {**about, "name": "process_sort_index", "args": {"sort_index": rank}}
        yield {**about, "name": "thread_name", "args": {"name": "actions"}}


def _transitions(events: Iterable[Mapping[str, Any]], zero_s: float) -> Iterator[Slice]:
    for event in events:
        if event["event"] == Event.TRANSITION:
            kept = ("receipt", "from_version", "to_version", "total_s", "moved_bytes", "reason")
            yield {
                "name": f"plan {event.get('from_version')} to {event.get('to_version')}",
                "cat": "transition",
                "ph": "i",
                "s": "g",
                "pid": event["rank"],
                "tid": 0,
                "ts": _us(float(event["time_s"]) - zero_s),
                "args": {"step": event["step"], **{name: event.get(name) for name in kept}},
            }


def _track(steps: Sequence[RankStep], zero_s: float) -> Iterator[Slice]:
    """Steps of one rank in the order of the log, one after the other."""
    free_us = -math.inf
    for step in steps:
        first_s = min((one.start_s for one in step.actions), default=0.0)
        # Where the clock was set back, a step is drawn right after the one before it.
        base_s = max(step.begun_s - zero_s, free_us / 1e6 - first_s)
        for action in step.actions:
            whole = base_s + action.start_s, base_s + action.end_s
            if not all(map(math.isfinite, whole)):
                continue
            # Whole nanoseconds: slices that touch do so in the file, too.
            begin_us = max(_us(whole[0]), free_us)
            end_us = max(_us(whole[1]), begin_us)
            free_us = end_us
            yield from _slices(step, action, begin_us, end_us)


def _slices(step: RankStep, action: TimedAction, begin_us: float, end_us: float) -> Iterator[Slice]:
    numbered = action.micro_batch >= 0
    chunk = f"#{action.chunk}" if action.chunk else ""
    name = NAMES[action.kind] + (f"{action.micro_batch}{chunk}" if numbered else "")
    args: dict[str, Any] = {"step": step.step, "plan": step.version}
    if numbered:
        args |= {"micro_batch": action.micro_batch, "chunk": action.chunk}
    args |= {"own_ms": action.own_s * 1e3, "wait_ms": action.wait_s * 1e3}
    place = {"pid": step.rank, "tid": 0}
    yield {
        **place,
        "name": name,
        "cat": CATEGORIES[action.kind],
        "ph": "X",
        "ts": begin_us,
        "dur": round(end_us - begin_us, 3),
        "args": args,
    }
    wait_us = min(round(action.wait_s * 1e6, 3), round(end_us - begin_us, 3))
    if wait_us > 0:
        start_us = round(end_us - wait_us, 3)
        yield {**place, "name": "wait", "cat": "wait", "ph": "X", "ts": start_us, "dur": wait_us}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def write_trace(trace: Mapping[str, Any], path: Path) -> None:
    """Writes it as JSON.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
