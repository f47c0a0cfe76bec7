"""The machine-readable log: one JSON object a line, stamped with time, rank and step.

Several ranks append to one file; each line is one ``write`` on a descriptor opened for appending,
so lines never interleave.
"""

from __future__ import annotations

import json
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from resihp_ext.errors import UserError


class Event(StrEnum):
    """Every event name that ``events.jsonl`` may hold."""

    JOB_START = "job_start"
    """Training is about to start: device, backend, versions, layout, resumed step."""
    MICRO_BATCHES = "micro_batches"
    """Workload of one step as one data-parallel rank saw it: per micro-batch, in order of
    execution, ``tokens`` and ``segments`` (lengths in tokens of the packed documents)."""
    ITERATION = "iteration"
    """A step is done: losses, ``grad_norm``, ``learning_rate``, ``skipped``."""
    JOB_END = "job_end"
    """Training ended without an error."""


class EventLog:
    """Appends events of one rank to ``events.jsonl``; the owner calls :meth:`close`."""

    def __init__(self, directory: Path, *, rank: int) -> None:
        """Opens the log, creating ``directory``.

        Raises:
            UserError: the directory cannot be written.
        """
        self.path = directory / "events.jsonl"
        self._rank = rank
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"{self.path}: {error.strerror}; give a writable --resilience-dir"
            ) from error

    def write(self, event: Event, *, step: int | None = None, **fields: Any) -> None:
        """Appends one event; ``fields`` must be JSON-serialisable."""
        line = {
            "time_s": time.time(),
            "rank": self._rank,
            "step": step,
            "event": event.value,
            **fields,
        }
        os.write(self._fd, (json.dumps(line, allow_nan=True) + "\n").encode())

    def close(self) -> None:
        """Closes the file; further writes fail."""
        os.close(self._fd)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads a log; a torn last line (the writer was killed) is left out."""
    events = []
    for line in path.read_text().splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return events
