"""Shows a running job's loss as it falls, and says at the end whether it learned.

    .venv/bin/python tools/follow_run.py DIR --steps N [--pid PID]

Reads ``DIR/events.jsonl``. Exit code 0 and a last line ``demo: OK ...`` when all N steps ran and
the mean loss of the last tenth is below 0.8 times that of the first; else 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from resihp_ext.events import Event, read_events

FALLING_RATIO = 0.8
POLL_S = 0.5
SHOW_EVERY = 10


def alive(pid: int | None) -> bool:
    """Whether the job still runs; a zombie that its shell has not collected counts as ended."""
    if pid is None:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def follow(path: Path, steps: int, pid: int | None) -> list[dict[str, Any]]:
    """Prints progress until the job ends; returns its events."""
    shown = 0
    while True:
        running = alive(pid)
        events = read_events(path) if path.exists() else []
        done = [event for event in events if event["event"] == Event.ITERATION]
        for event in done[shown:]:
            if event["step"] in (1, steps) or event["step"] % SHOW_EVERY == 0:
                print(
                    f"  step {event['step']:4} of {steps}   lm loss "
                    f"{event['losses']['lm loss']:.4f}   grad norm {event['grad_norm']:.3f}",
                    flush=True,
                )
        shown = len(done)
        if not running:
            return events
        time.sleep(POLL_S)


def workload(events: list[dict[str, Any]]) -> str:
    """How much the packed segments varied."""
    lengths = [
        length
        for event in events
        if event["event"] == Event.MICRO_BATCHES
        for micro_batch in event["micro_batches"]
        for length in micro_batch["segments"] or []
    ]
    if not lengths:
        return "not packed"
    ordered = sorted(lengths)
    return (
        f"{len(lengths)} segments of {ordered[0]} to {ordered[-1]} tokens, "
        f"median {ordered[len(ordered) // 2]}"
    )


def verdict(events: list[dict[str, Any]], steps: int, seconds: float) -> tuple[bool, str]:
    """Whether the job learned, and the line that says so."""
    losses = [e["losses"]["lm loss"] for e in events if e["event"] == Event.ITERATION]
    if len(losses) != steps:
        return False, f"demo: FAILED, {len(losses)} of {steps} steps ran"
    few = max(1, steps // 10)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    line = (
        f"lm loss {first:.3f} -> {last:.3f} in {steps} steps, {workload(events)}, {seconds:.0f} s"
    )
    if last > FALLING_RATIO * first:
        return False, f"demo: FAILED, the loss does not fall: {line}"
    return True, f"demo: OK {line}"


def main() -> int:
    """Follows the run that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pid", type=int, help="process of the job; without it, the run is over")
    parser.add_argument("--seconds-since", type=float, default=time.time(), help="start, Unix time")
    options = parser.parse_args()
    events = follow(options.directory / "events.jsonl", options.steps, options.pid)
    good, line = verdict(events, options.steps, time.time() - options.seconds_since)
    print(line, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
