"""How past steps were done, so that they can be done again from an older state.

A step is its samples, by number, and what the schedule had set for it. Samples are read again from
the data set: nothing is kept of them but where they begin.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from megatron.resilience.executor.manifest import exchange_texts
from megatron.resilience.executor.player import Pass
from megatron.resilience.executor.transition import StateLostError
from resihp_ext.errors import ResiHPError

if TYPE_CHECKING:
    from megatron.resilience.executor.executor import Executor

MOST = 100_000
"""Steps of which a rank remembers how they were done; a few hundred bytes each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """What is special about one step."""

    step: int
    """Steps of the training loop before it."""
    position: int
    """Samples before it."""
    micro_batches: int
    groups: list[dict[str, float]]
    """Learning rate and decay of each parameter group."""


class History:
    """Steps by the updates that were done before them."""

    def __init__(self) -> None:
        self._steps: dict[int, Replayed] = {}

    def record(self, updates: int, step: int, work: Pass, groups: list[dict[str, float]]) -> None:
        """Keeps what it takes to do a step again much later."""
        self._steps[updates] = Replayed(
            step=step, position=work.position, micro_batches=work.micro_batches, groups=groups
        )
        self._steps.pop(updates - MOST, None)

    def find(self, updates: int) -> Replayed | None:
        """The step after so many updates."""
        return self._steps.get(updates)

    def place(self, updates: int, micro_batch_size: int) -> tuple[int, int] | None:
        """Steps of the training loop, and samples, that a state has behind it; None: unknown."""
        after, before = self._steps.get(updates), self._steps.get(updates - 1)
        if after is not None:
            return after.step, after.position
        if before is not None:
            samples = before.micro_batches * micro_batch_size
            return before.step + 1, before.position + samples
        return None

    def knows(self, first: int, end: int) -> bool:
        """Whether none of the steps after ``first`` to ``end - 1`` updates is lacking."""
        return all(updates in self._steps for updates in range(first, end))

    def told(self, first: int, end: int) -> str:
        """These steps as JSON."""
        return json.dumps([asdict(self._steps[updates]) for updates in range(first, end)])

    def take(self, first: int, text: str) -> None:
        """Takes over what another rank has told."""
        for updates, fields in enumerate(json.loads(text), first):
            self._steps.setdefault(updates, Replayed(**fields))


def share(executor: Executor, first: int, end: int) -> None:
    """Tells those who came later how steps before their time were done; collective.

    Raises:
        StateLostError: nobody knows all of them.
    """
    history = executor.history
    knows = history.knows(first, end)
    told = exchange_texts("all" if knows else "", executor.device)
    if all(told):
        return
    if not any(told):
        raise StateLostError(
            f"steps {first + 1} to {end} must be done again, and no rank knows all of them"
        )
    speaks = knows and executor.world.number(executor.seat.rank) == told.index("all")
    text = history.told(first, end) if speaks else ""
    history.take(first, next(filter(None, exchange_texts(text, executor.device))))


def replay(executor: Executor) -> None:
    """Does the step after the present state again, as it was done; collective.

    Raises:
        ResiHPError: this rank does not know it.
    """
    optimizer, last = executor.optimizer, executor.last
    assert optimizer is not None
    found = executor.history.find(optimizer.steps)
    if found is None or last is None:
        raise ResiHPError(
            f"step {optimizer.steps + 1} must be done again, and rank {executor.seat.rank} does "
            "not know how it was done"
        )
    again = replace(last, position=found.position, micro_batches=found.micro_batches, counts=False)
    now = optimizer.settings()
    executor.aim(again)
    optimizer.set_settings(found.groups)
    for model in executor.models:
        model.train()
    optimizer.step()
    optimizer.set_settings(now)
    executor.aim(last)
