"""Shows a running job: its loss as it falls, and every change of its layout.

    .venv/bin/python tools/follow_run.py DIR --steps N [--pid PID]

Reads ``DIR``, the job's ``--resilience-dir``. Exit code 0 when all N steps ran, the mean loss of
the last tenth is below 0.8 times that of the first, and every rank that no fault on purpose has
hit still has the process it began with; else 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from megatron.resilience.faults.register import Worker, read_workers
from resihp_ext.errors import UserError
from resihp_ext.events import Event, read_events
from resihp_ext.whatif.layout import ranges

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


class Processes:
    """Which process each rank began with, and which it has now."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.first: dict[int, Worker] = {}
        self.now: dict[int, Worker] = {}

    def look(self) -> None:
        """Notes who is new."""
        try:
            self.now = read_workers(self._folder)
        except UserError:
            return  # nobody has started yet
        self.first = self.now | self.first

    def hit(self) -> set[int]:
        """Ranks that faults on purpose have struck."""
        paths = (self._folder / "faults").glob("*.done")
        return {int(json.loads(path.read_text())["rank"]) for path in paths}

    def verdict(self) -> tuple[bool, str]:
        """Whether the ranks that were not hit have kept their processes, and a line."""
        hit = self.hit()
        kept = [
            rank
            for rank, one in sorted(self.now.items())
            if rank not in hit and one == self.first[rank] and not one.incarnation
        ]
        pids = ", ".join(str(self.now[rank].pid) for rank in kept)
        lost = sorted(self.now.keys() - set(kept) - hit)
        if lost:
            return False, f"FAILED: no fault has hit ranks {ranges(lost)}, and others run as them"
        return True, f"ranks {ranges(kept)} have kept their processes: pids {pids}"


def line_of(event: dict[str, Any], steps: int) -> str:
    """What is shown of an event; nothing for most."""
    step = event["step"]
    if event["event"] == Event.TRANSITION:
        return (
            f"  step {step:4} of {steps}   {event['reason']}: "
            f"plan {event['to_version']} after {event['total_s']:.2f} s"
        )
    if event["event"] != Event.ITERATION or not (step in (1, steps) or step % SHOW_EVERY == 0):
        return ""
    return (
        f"  step {step:4} of {steps}   lm loss {event['losses']['lm loss']:.4f}   "
        f"grad norm {event['grad_norm']:.3f}"
    )


def follow(path: Path, steps: int, pid: int | None, processes: Processes) -> list[dict[str, Any]]:
    """Prints progress until the job ends; returns its events."""
    shown = 0
    while True:
        running = alive(pid)
        processes.look()
        events = read_events(path) if path.exists() else []
        for event in events[shown:]:
            line = line_of(event, steps)
            if line:
                print(line, flush=True)
        shown = len(events)
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
    return f"segments of {ordered[0]} to {ordered[-1]} tokens"


def verdict(events: list[dict[str, Any]], steps: int, seconds: float) -> tuple[bool, str]:
    """Whether the job learned, and the line that says so."""
    # A step that was done again counts once.
    found = {e["step"]: e["losses"]["lm loss"] for e in events if e["event"] == Event.ITERATION}
    losses = [loss for _, loss in sorted(found.items())]
    if len(losses) != steps:
        return False, f"FAILED: {len(losses)} of {steps} steps ran"
    few = max(1, steps // 10)
    first, last = sum(losses[:few]) / few, sum(losses[-few:]) / few
    line = (
        f"lm loss {first:.3f} -> {last:.3f} in {steps} steps, {workload(events)}, {seconds:.0f} s"
    )
    if last > FALLING_RATIO * first:
        return False, f"FAILED: the loss does not fall: {line}"
    return True, line


def main() -> int:
    """Follows the run that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pid", type=int, help="process of the job; without it, the run is over")
    options = parser.parse_args()
    started_s = time.time()
    processes = Processes(options.directory)
    events = follow(options.directory / "events.jsonl", options.steps, options.pid, processes)
    verdicts = [verdict(events, options.steps, time.time() - started_s), processes.verdict()]
    for _, line in verdicts:
        print(f"  {line}", flush=True)
    return 0 if all(good for good, _ in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
