"""Faults for a job that runs: files ``faults/dropped/NNN.yaml`` that its workers look for.

Numbered without gaps, so that looking for the next one is one look-up of a name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from resihp_ext.faults.fault import Fault
from resihp_ext.faults.read import faults_to_yaml


def drop(folder: Path, fault: Fault) -> str:
    """Leaves a fault for the workers of a job.

    Args:
        folder: ``faults/`` of the job.

    Returns:
        Name of the fault.
    """
    place = folder / "dropped"
    place.mkdir(parents=True, exist_ok=True)
    part = place / f"{os.getpid()}.part"
    part.write_text(faults_to_yaml([fault]))
    try:
        for number in count():
            try:
                # Whole at once, and never over another's.
                os.link(part, place / f"{number:03d}.yaml")
            except FileExistsError:
                continue
            return f"d{number:03d}-0"
    finally:
        part.unlink()
    raise AssertionError("count does not end")


class Inbox:
    """What one worker has seen of the dropped faults."""

    def __init__(self, folder: Path) -> None:
        """Begins at the first.

        Args:
            folder: ``faults/`` of the job.
        """
        self._folder = folder / "dropped"
        self._number = 0
        self._next = self._path()

    def _path(self) -> str:
        return str(self._folder / f"{self._number:03d}.yaml")

    def news(self) -> Iterator[tuple[str, str]]:
        """Number and path of each file that has come since the last look."""
        while os.path.exists(self._next):
            yield f"d{self._number:03d}", self._next
            self._number += 1
            self._next = self._path()
