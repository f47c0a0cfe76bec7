"""Who writes that a step is done: one rank, and another one when that is lost before it could.

The rank that writes may be lost after a step was decided and before it has written. All others have
the same figures: who writes next looks whether those of the step before are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from megatron.resilience.patches.training_log import Iteration
from resihp_ext.events import Event, EventLog, read_tail


class IterationRecords:
    """Events ``iteration`` of one rank."""

    def __init__(self, events: EventLog | None, rank: int) -> None:
        self._events, self._rank = events, rank
        self._last: Iteration | None = None
        self._writer = -1
        """Of the last step."""

    def done(self, iteration: Iteration, members: Sequence[int]) -> None:
        """A step is done.

        Args:
            members: Ranks that train together, ascending. The last one writes, from which
                Megatron logs as well.
        """
        self.complete(members)
        self._last, self._writer = iteration, members[-1]
        if self._rank == self._writer:
            self._write(iteration)

    def complete(self, members: Sequence[int]) -> None:
        """Writes the last step if whose turn it was is lost, and had not done so."""
        last = self._last
        if last is None or self._events is None or self._writer in members:
            return
        self._writer = members[-1]
        if self._rank != self._writer:
            return
        steps = [
            event["step"]
            for event in read_tail(self._events.path)
            if event["event"] == Event.ITERATION
        ]
        if last.step not in steps:
            self._write(last)

    def _write(self, iteration: Iteration) -> None:
        if self._events is not None:
            fields = asdict(iteration)
            self._events.write(Event.ITERATION, step=fields.pop("step"), **fields)
