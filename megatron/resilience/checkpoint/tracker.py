"""Megatron's tracker file: which iteration of a checkpoint directory was finished last.

Upstream rewrites it in place, so a crash can leave it empty; at the next start upstream prints an
error and exits with code 0, which schedulers take for success. Here a garbled tracker is a state
like any other, and rewriting is atomic.

Promise: reading never raises for bad content. Imports neither torch nor Megatron.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

TRACKER_FILE = "latest_checkpointed_iteration.txt"
LONGEST_TRACKER_BYTES = 64
RELEASE = "release"

type TrackerState = Literal["absent", "iteration", "release", "garbled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tracker:
    """Content of one tracker file."""

    path: Path
    state: TrackerState
    """``garbled``: the file exists but holds neither a whole number nor ``release``."""
    iteration: int | None = None
    """The iteration, for state ``iteration`` only."""


def read_tracker(directory: Path) -> Tracker:
    """Read the tracker of the checkpoint directory ``directory``.

    Raises:
        OSError: the file exists but cannot be read.
    """
    path = directory / TRACKER_FILE
    try:
        with path.open("rb") as stream:
            content = stream.read(LONGEST_TRACKER_BYTES)
    except FileNotFoundError:
        return Tracker(path=path, state="absent")
    text = content.decode("ascii", errors="replace").strip()
    if re.fullmatch(r"[0-9]+", text):
        return Tracker(path=path, state="iteration", iteration=int(text))
    return Tracker(path=path, state="release" if text == RELEASE else "garbled")


def write_tracker(directory: Path, iteration: int) -> None:
    """Replace the tracker atomically: readers see the old or the new content, never neither.

    Raises:
        OSError: the directory is not writable or full.
    """
    path = directory / TRACKER_FILE
    temporary = path.with_name(f"{TRACKER_FILE}.{os.getpid()}.tmp")
    try:
        with temporary.open("w") as stream:
            stream.write(str(iteration))
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
