"""The steps of a job that runs, as they are done."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path


class Steps:
    """When steps were done, read from a growing ``events.jsonl``."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0
        self._rest = b""
        self._done_s: list[float] = []

    def done_after(self, moment_s: float) -> int:
        """How many steps have ended since then."""
        return sum(done_s > moment_s for done_s in self.times())

    def times(self) -> list[float]:
        """Of all steps so far, in the order in which they were done."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._read)
            added = file.read()
            self._read += len(added)
            *lines, self._rest = (self._rest + added).split(b"\n")
            events = (json.loads(line) for line in lines if b'"iteration"' in line)
            self._done_s += [event["time_s"] for event in events]
        return list(self._done_s)
