"""How far this worker is, written by the main thread and read by the link's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from resihp_ext.control.messages import Progress


class Pace:
    """Counts what was done; plain attributes, so that counting costs next to nothing."""

    __slots__ = ("micro_batch", "phase", "rank", "step", "ticks", "waiting")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.step = 0
        self.micro_batch = 0
        self.phase = "setup"
        self.waiting = False
        self.ticks = 0

    def enter(self, phase: str, micro_batch: int = 0, *, waiting: bool = False) -> None:
        """Another phase begins; the one before has ended."""
        self.phase, self.micro_batch, self.waiting = phase, micro_batch, waiting
        self.ticks += 1

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Inside, this worker waits for others."""
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
            self.ticks += 1

    def told(self) -> Progress:
        """As a message."""
        return Progress(
            rank=self.rank,
            step=self.step,
            micro_batch=max(self.micro_batch, 0),
            phase=self.phase,
            waiting=self.waiting,
            ticks=self.ticks,
        )
