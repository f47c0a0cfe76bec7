"""The machine-readable log: one JSON object a line, stamped with time, rank and step.

Several ranks append to one file; each line is one ``write`` on a descriptor opened for appending,
so lines never interleave. A log that cannot be written is no reason to stop training: it is said
once, and training goes on.
"""

from __future__ import annotations

import json
import logging
import os
import time
from enum import StrEnum
from pathlib import Path
from typing import Any

from resihp_ext.errors import UserError

logger = logging.getLogger(__name__)


class Event(StrEnum):
    """Every event name that ``events.jsonl`` may hold."""

    JOB_START = "job_start"
    """Training is about to start: device, backend, versions, layout; ``step`` is the one
    it resumes from, or 0."""
    MICRO_BATCHES = "micro_batches"
    """Workload of one step as one data-parallel rank saw it: per micro-batch, in order of
    execution, ``tokens`` and ``segments`` (lengths in tokens of the packed documents); ``replica``,
    ``plan`` (its version). Written before the step is decided: of a step that is repeated, those of
    the latest plan count."""
    ITERATION = "iteration"
    """A step is done: losses, ``grad_norm``, ``learning_rate``, ``skipped``."""
    STEP_TIMES = "step_times"
    """How long each action of this rank took in a step, and how much of it the rank waited:
    ``times``, a :class:`~resihp_ext.detector.timed.RankStep` with nested lists in the place of
    structs; every ``--resilience-timings-steps`` steps. On a GPU a step late, and not of the
    last."""
    TRANSITION = "transition"
    """The layout has changed before a step: ``receipt`` (number of the file in ``receipts/``),
    ``from_version``, ``to_version``, ``total_s``, ``moved_bytes``, ``reason``."""
    WEIGHED = "weighed"
    """With ``--resilience-detect act``: whether another plan for slow devices is worth the change;
    ``verdict`` (``act``, ``wait``, ``no``), ``why``, ``gain`` (part of a step), ``lost_s`` (for
    want of it, so far), ``cost_s`` (of the change). When the verdict is another one, and every 50
    steps; written by the lowest member."""
    MIGRATED = "migrated"
    """Within this step a micro-batch has passed a stage in another replica than planned:
    ``micro_batch``, ``source`` and ``target`` (``replica.stage``)."""
    VALIDATION = "validation"
    """The coordinator has had a suspect measured, or measured again: ``kind``, ``ranks``,
    ``verdict``, ``p`` by rank and ``links`` by pair where they are decided, ``estimated_p``,
    ``again`` (whether it was known), ``evidence``, ``took_s`` at the boundary."""
    JOB_END = "job_end"
    """Training ended without an error; under a plan ``sent_bytes`` and ``between_nodes_bytes``,
    what this rank has sent over stage boundaries in all."""


class EventLog:
    """Appends events of one rank to ``events.jsonl``; the owner calls :meth:`close`."""

    def __init__(self, directory: Path, *, rank: int | None) -> None:
        """Opens the log, creating ``directory``.

        Args:
            rank: None: the coordinator's.

        Raises:
            UserError: the directory cannot be written.
        """
        self.path = directory / "events.jsonl"
        self._rank = rank
        self._complained = False
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"{self.path}: {error.strerror}; give a writable --resilience-dir"
            ) from error

    def write(self, event: Event, *, step: int | None = None, **fields: Any) -> None:
        """Appends one event; ``fields`` must be JSON-serialisable.

        Raises:
            ValueError: the log is closed.
        """
        if self._fd < 0:
            raise ValueError(f"{self.path} is closed")
        line = {
            "time_s": time.time(),
            "rank": self._rank,
            "step": step,
            "event": event.value,
            **fields,
        }
        text = json.dumps(line, allow_nan=True) + "\n"
        try:
            self._append(text.encode())
        except OSError as error:
            if not self._complained:
                logger.warning("%s: %s; events are missing from here on", self.path, error.strerror)
            self._complained = True

    def _append(self, line: bytes) -> None:
        """Appends a whole line, also where another writer was killed in the middle of one.

        A line of another rank that is being written looks torn too: then a blank line follows it.
        """
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) not in (b"\n", b""):
            line = b"\n" + line
        written = os.write(self._fd, line)
        while written < len(line):  # a disk that is just filling up takes a part of it
            written += os.write(self._fd, line[written:])

    def close(self) -> None:
        """Closes the file; further writes fail."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads a log; lines torn by the death of their writer or a full disk are left out."""
    return _parsed(path.read_text().splitlines())


def read_tail(path: Path, most_bytes: int = 1 << 20) -> list[dict[str, Any]]:
    """Reads the latest events of a log."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most_bytes))
        return _parsed(file.read().decode(errors="replace").splitlines())


def _parsed(lines: list[str]) -> list[dict[str, Any]]:
    events = []
    for line in lines:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        # What is left of a line whose beginning is missing may be JSON, too.
        if isinstance(event, dict) and "event" in event:
            events.append(event)
    return events
