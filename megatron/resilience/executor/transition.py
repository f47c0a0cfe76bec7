"""The change from one plan to another between two steps, in the same processes.

plan agreed -> groups -> modules -> state layout -> state moved -> digests equal -> go on. Only what
changes is rebuilt: a rank whose seat stays keeps its modules, a group that both plans want stays,
state moves only to ranks that lack it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

from megatron.resilience.executor.buffers import MASTER, DomainBuffer
from megatron.resilience.executor.checksum import digest
from megatron.resilience.executor.layout import StateLayout
from megatron.resilience.executor.manifest import Piece, exchange_texts
from megatron.resilience.executor.needs import Kinds
from megatron.resilience.executor.store import WEIGHT, Store, state_stores, weight_store
from resihp_ext.errors import ResiHPError
from resihp_ext.plan.plan import Plan


class TransitionError(ResiHPError):
    """A change of layout that did not keep the state, or on which ranks do not agree."""


class StateLostError(ResiHPError):
    """Nobody has the whole state: no owners, no copies, no checkpoint. On all members alike."""


@dataclass
class Phases:
    """Seconds of each phase of a transition, in order."""

    seconds: dict[str, float] = field(default_factory=dict)
    ended_s: float = 0.0
    """When the last one did, on the clock of ``time.perf_counter``."""

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.ended_s = time.perf_counter()
            self.seconds[name] = self.seconds.get(name, 0.0) + self.ended_s - started


@dataclass(frozen=True, kw_only=True)
class Held:
    """The state of this rank under one plan."""

    version: int
    """Of the plan."""
    layout: StateLayout
    buffers: Sequence[DomainBuffer]
    pieces: Sequence[Piece]

    def with_layout(self, layout: StateLayout) -> Self:
        """The same, where others have lost or gained something."""
        return replace(self, layout=layout)

    def among(self, ranks: Collection[int], *, masters_only: bool = False) -> Self:
        """What of it is left with some ranks.

        Args:
            masters_only: Whether weights count only where their masters are: modules may hold older
                ones, when a step was broken off.
        """
        layout = self.layout.among(ranks, masters_only=masters_only)
        return replace(self, layout=layout, pieces=() if masters_only else self.pieces)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What a transition moved, over all ranks."""

    bytes: int
    """Sent over the network between ranks."""
    lower_bound_bytes: int
    """What ranks need and lacked."""
    messages: int


def agree(plan: Plan, ranks: Sequence[int], device: torch.device) -> None:
    """Compares the plan's digest over all live ranks, before anything is changed.

    Raises:
        TransitionError: ranks have different plans.
    """
    digests = exchange_texts(plan.digest, device)
    if len(set(digests)) > 1:
        by_digest: dict[str, list[int]] = {}
        for rank, one in zip(ranks, digests, strict=True):
            by_digest.setdefault(one[:12], []).append(rank)
        raise TransitionError(f"ranks have different plans: {by_digest}")


@dataclass(frozen=True, slots=True)
class Stores:
    """The state of this rank before and after, by kind."""

    sources: Mapping[str, Store]
    targets: Mapping[str, Store]

    @classmethod
    def of(cls, old: Held, new: Held, kinds: Kinds) -> Self:
        """Finds out where everything is."""
        state = {kind: dtype for kind, dtype in kinds.items() if kind != WEIGHT}
        weight = kinds[WEIGHT]
        sources = {WEIGHT: weight_store(old.buffers, old.pieces, weight)}
        # Rounded weights must not be written to masters.
        both = MASTER not in kinds
        targets = {WEIGHT: weight_store(new.buffers, new.pieces, weight, masters=both)}
        return cls(
            sources | state_stores(old.buffers, state), targets | state_stores(new.buffers, state)
        )

    def keep(self) -> None:
        """Takes over what this rank has already."""
        for kind, store in self.targets.items():
            store.take(self.sources[kind])

    def derive(self) -> None:
        """Makes the weights that follow from masters here."""
        if MASTER in self.targets:
            self.targets[WEIGHT].take(self.targets[MASTER])


def state_digest(held: Held, kinds: Sequence[str], rank: int, device: torch.device) -> list[str]:
    """Digest of each kind of logical state, the same under every layout; collective.

    Every element is counted once, by one of those who keep it.
    """
    mine = []
    stores = state_stores(held.buffers, dict.fromkeys(kinds, torch.float32))
    counted = held.layout.counted.get(rank, ())
    for kind in kinds:
        found = (part for slab in counted for part in stores[kind].parts(slab))
        mine.append(sum(digest(slab, values) for slab, values in found))
    texts = exchange_texts(",".join(map(str, mine)), device)
    rows = [[int(value) for value in text.split(",")] for text in texts]
    return [f"{sum(column) % (1 << 64):016x}" for column in zip(*rows, strict=True)]


def receipt(
    *,
    step: int,
    before: Plan,
    after: Plan,
    phases: Phases,
    moved: Moved,
    digests: Mapping[str, str],
    rebuilt: Sequence[int],
    groups: tuple[int, int],
    reason: str,
    rewound: int | None,
    source: str,
) -> dict[str, Any]:
    """The receipt of a transition, for ``receipts/NNN.json``."""
    return {
        "reason": reason,
        "step": step,
        "from_version": before.version,
        "to_version": after.version,
        "from_plan": before.digest,
        "to_plan": after.digest,
        "phases_s": phases.seconds,
        "total_s": sum(phases.seconds.values()),
        "moved_bytes": moved.bytes,
        "lower_bound_bytes": moved.lower_bound_bytes,
        "messages": moved.messages,
        "state_digests": dict(digests),
        "ranks_with_new_modules": list(rebuilt),
        "groups_made": groups[0],
        "groups_ended": groups[1],
        "source": source,
        "rewound_to_step": rewound,
        "redone_steps": 0,
    }
