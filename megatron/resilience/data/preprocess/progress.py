"""How far the run is, on standard error: a bar on a terminal, now and then a line elsewhere.

Promise: standard output stays free for the summary; a log file grows by one line in ten seconds.
"""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LINE_INTERVAL_S = 10.0


class ProgressDisplay:
    """Shows progress through the source files. Use as a context manager."""

    def __init__(self, total_bytes: int) -> None:
        self._total_bytes = total_bytes
        self._read_bytes = 0
        self._last_line_s = time.monotonic()
        self._bar: Progress | None = None
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("preprocessing"),
                BarColumn(),
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[documents]:,} documents"),
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=total_bytes, documents=0)

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, source_bytes: int, *, documents: int) -> None:
        """Count ``source_bytes`` more of the files on disk; ``documents`` is the total so far."""
        self._read_bytes += source_bytes
        if self._bar is not None:
            self._bar.update(self._task, completed=self._read_bytes, documents=documents)
            return
        now_s = time.monotonic()
        if now_s - self._last_line_s >= _LINE_INTERVAL_S:
            self._last_line_s = now_s
            part = 100 * self._read_bytes / max(self._total_bytes, 1)
            print(  # noqa: T201 - this is the display
                f"preprocessing: {part:.0f} % of {self._total_bytes / 1e6:,.0f} MB, "
                f"{documents:,} documents",
                file=sys.stderr,
                flush=True,
            )
