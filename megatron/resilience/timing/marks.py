"""Points in time: on the host's clock, or on the stream of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

Mark = Any
"""A point in time, as its source makes it."""


class Marks(Protocol):
    """Makes points in time, and says later how far they are apart."""

    lag: int
    """Steps after which a mark is read without waiting for the device."""

    def mark(self) -> Mark:
        """Now, as the work that was begun so far sees it."""
        ...

    def is_past(self, mark: Mark) -> bool:
        """Whether it can be read."""
        ...

    def between_s(self, first: Mark, second: Mark) -> float:
        """Seconds from one to the other; both are past."""
        ...

    def give_back(self, marks: Iterable[Mark]) -> None:
        """Says that nobody will ask for them again."""
        ...


class HostMarks:
    """For work that is done when a call returns."""

    lag = 0

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        """Takes a clock that never goes back."""
        self.mark = now_s

    def is_past(self, _mark: Mark) -> bool:
        return True

    def between_s(self, first: Mark, second: Mark) -> float:
        seconds: float = second - first
        return seconds

    def give_back(self, marks: Iterable[Mark]) -> None:
        """Nothing to do: a number is no resource."""


class DeviceMarks:
    """For work that is queued on the current CUDA stream: events from a pool.

    Nothing waits for them. By the end of the next step they have happened, because every step reads
    the norm of its gradients.
    """

    lag = 1

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> Mark:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_past(self, mark: Mark) -> bool:
        return bool(mark.query())

    def between_s(self, first: Mark, second: Mark) -> float:
        return float(first.elapsed_time(second)) * 1e-3

    def give_back(self, marks: Iterable[Mark]) -> None:
        self._free.extend(marks)


def marks_for(device: torch.device) -> Marks:
    """What times the work of a device."""
    return DeviceMarks() if device.type == "cuda" else HostMarks()
