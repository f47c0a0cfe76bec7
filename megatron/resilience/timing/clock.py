"""Times every action of a step on this rank, and in it the waits for others.

An action lasts from its :meth:`~StepClock.begin` to the next one's, or to
:meth:`~StepClock.end`. What lies in no action (the training loop between two steps, say) is in the
total alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.resilience.timing.marks import HostMarks, Mark, Marks
from resihp_ext.detector.timed import MicroBatch, RankStep, TimedAction
from resihp_ext.packing import squared_lengths
from resihp_ext.plan.action import COMPUTE, RECEIVES, Kind

Lengths = tuple[int, int, torch.Tensor | None]
"""Samples of a micro-batch, tokens of each, and where packed segments begin and end."""


@dataclass(slots=True)
class _Timed:
    """An action between its marks."""

    kind: Kind
    micro_batch: int
    chunk: int
    begun: Mark
    ended: Mark = None
    waits: list[Mark] = field(default_factory=list)
    """Begin and end of each, in turn."""


@dataclass(slots=True)
class _Record:
    """A step before it is read."""

    step: int
    version: int
    zero: Mark
    zero_s: float
    """The same point on the host's clock."""
    begun_s: float = 0.0
    """Since the epoch."""
    total_s: float = 0.0
    before_s: float = 0.0
    """From the end of the step before to :attr:`zero`."""
    actions: list[_Timed] = field(default_factory=list)
    lengths: dict[int, Lengths] = field(default_factory=dict)
    """Of the micro-batches that were read here."""

    def marks(self) -> Iterator[Mark]:
        yield self.zero
        previous = self.zero
        for action in self.actions:
            for mark in (action.begun, *action.waits, action.ended):
                if mark is not previous and mark is not None:
                    yield mark
                previous = mark


class StepClock:
    """Where the time of a step goes; costs nothing while nobody asks.

    Attributes:
        on_step: Called with every step that was done, some steps late on a GPU.
        computing: Whether a forward or backward action is being timed, outside a wait.
    """

    def __init__(
        self,
        rank: int,
        marks: Marks | None = None,
        *,
        now_s: Callable[[], float] = time.perf_counter,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        """Prepares a clock.

        Args:
            rank: For reports.
            marks: Default: the host's clock.
            now_s: The host's clock, which never goes back.
            wall_s: Seconds since the epoch.
        """
        self.on_step: list[Callable[[RankStep], None]] = []
        self.computing = False
        self._rank = rank
        self._marks = marks or HostMarks(now_s)
        self._now_s, self._wall_s = now_s, wall_s
        self._record: _Record | None = None
        self._open: _Timed | None = None
        self._unread: deque[_Record] = deque()
        self._ended_s: float | None = None
        """When the step before was over."""
        self._apart_s = 0.0
        """Since then, on what does not belong to any step."""

    # The course of a step

    def restart(self, step: int, version: int) -> None:
        """An attempt at a step begins; one that was broken off is forgotten."""
        self.drop()
        if self.on_step:
            zero_s = self._now_s()
            self._record = _Record(step, version, self._marks.mark(), zero_s)

    def begin(self, kind: Kind, micro_batch: int = -1, chunk: int = 0) -> None:
        """An action begins, and the one before it is over; done again, it replaces the former."""
        record = self._record
        if record is None:
            return
        mark = self._marks.mark()
        self._close(mark)
        action = _Timed(kind, micro_batch, chunk, mark)
        last = record.actions[-1] if record.actions else None
        if last is not None and _key(last) == _key(action):
            record.actions.pop()
        record.actions.append(action)
        self._open, self.computing = action, kind in COMPUTE

    def end(self) -> None:
        """The last action is over, and none follows at once."""
        if self._open is not None:
            self._close(self._marks.mark())

    def finish(self) -> None:
        """The step is done; it is told to those who asked, unless this rank was late for it."""
        self.end()
        now_s, record = self._now_s(), self._record
        if record is not None:
            since_s = record.zero_s if self._ended_s is None else self._ended_s + self._apart_s
            record.before_s, record.total_s = record.zero_s - since_s, now_s - since_s
            record.begun_s = self._wall_s() - record.total_s
            self._unread.append(record)
        self._ended_s, self._apart_s, self._record = now_s, 0.0, None
        while len(self._unread) > self._marks.lag and self._is_past(self._unread[0]):
            self._tell(self._unread.popleft())

    def drop(self) -> None:
        """Forgets the step that is being timed, if any: it was broken off."""
        if self._record is not None:
            self._close(None)
            self._marks.give_back(self._record.marks())
            self._record = None

    # Inside it

    def wait_begins(self) -> None:
        """This rank has nothing to do until others have come."""
        if self._open is not None and len(self._open.waits) % 2 == 0:
            self._open.waits.append(self._marks.mark())
            self.computing = False

    def wait_ends(self) -> None:
        """They have."""
        if self._open is not None and len(self._open.waits) % 2:
            self._open.waits.append(self._marks.mark())
            self.computing = self._open.kind in COMPUTE

    def meet(self) -> float:
        """Lets only the first wait of this action be one: what follows it counts as own work.

        Returns:
            Seconds of that wait, where the host's clock tells them; else 0.0.
        """
        waits = [] if self._open is None or self._marks.lag else self._open.waits
        del waits[2:]
        return self._marks.between_s(*waits) if len(waits) == 2 else 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What is inside is a wait."""
        self.wait_begins()
        try:
            yield
        finally:
            self.wait_ends()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is inside belongs to no step: evaluations, checkpoints."""
        begun_s = self._now_s()
        try:
            yield
        finally:
            self._apart_s += self._now_s() - begun_s

    def note(self, samples: int, tokens: int, bounds: torch.Tensor | None) -> None:
        """The micro-batch of this action was read.

        Args:
            tokens: Of each sample.
            bounds: Where packed segments begin and end, all samples in one row.
        """
        if self._record is None or self._open is None or self._open.kind is not Kind.FORWARD:
            return
        number = self._open.micro_batch
        if number not in self._record.lengths:
            if bounds is not None and bounds.is_cuda:
                bounds = bounds.to("cpu", non_blocking=True)  # is read when the marks are
            self._record.lengths[number] = samples, tokens, bounds

    # Reading

    def _close(self, mark: Mark) -> None:
        if self._open is not None:
            self._open.ended = mark
            self._open, self.computing = None, False

    def _is_past(self, record: _Record) -> bool:
        last = record.actions[-1].ended if record.actions else record.zero
        return self._marks.is_past(last)

    def _tell(self, record: _Record) -> None:
        found = RankStep(
            rank=self._rank,
            step=record.step,
            version=record.version,
            begun_s=record.begun_s,
            total_s=record.total_s,
            actions=tuple(self._read(record, action) for action in record.actions),
            micro_batches=tuple(
                MicroBatch(number, samples * tokens, _squared(samples, tokens, bounds))
                for number, (samples, tokens, bounds) in sorted(record.lengths.items())
            ),
        )
        self._marks.give_back(record.marks())
        for listener in self.on_step:
            listener(found)

    def _read(self, record: _Record, action: _Timed) -> TimedAction:
        between_s, waits = self._marks.between_s, action.waits
        took_s = wait_s = between_s(action.begun, action.ended)
        if action.kind not in RECEIVES:
            wait_s = sum(map(between_s, waits[::2], waits[1::2]))
        return TimedAction(
            kind=action.kind,
            micro_batch=action.micro_batch,
            chunk=action.chunk,
            start_s=record.before_s + between_s(record.zero, action.begun),
            own_s=max(took_s - wait_s, 0.0),
            wait_s=wait_s,
        )


def _key(action: _Timed) -> tuple[Any, ...]:
    return action.kind, action.micro_batch, action.chunk


def _squared(samples: int, tokens: int, bounds: torch.Tensor | None) -> int:
    """Sum of the squared segment lengths; without packing each sample is one segment."""
    if bounds is None:
        return samples * tokens * tokens
    return squared_lengths(bounds.tolist())


OFF = StepClock(0)
"""For passes that belong to no step; nobody asks it."""
