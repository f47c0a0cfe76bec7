"""The change from one plan to another between two steps, in the same processes.

plan agreed -> groups -> modules -> state layout -> state moved -> digests equal -> go on. Only what
changes is rebuilt: a rank whose seat stays keeps its modules, a group that both plans want stays,
state moves only to ranks that lack it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron.resilience.executor import move
from megatron.resilience.executor.buffers import MASTER, DomainBuffer
from megatron.resilience.executor.checksum import digest
from megatron.resilience.executor.layout import StateLayout
from megatron.resilience.executor.manifest import Piece, exchange_texts
from megatron.resilience.executor.store import WEIGHT, stores_of
from resihp_ext.errors import ResiHPError
from resihp_ext.plan.plan import Plan
from resihp_ext.state.shards import shares
from resihp_ext.state.slab import Holdings
from resihp_ext.state.transfer import Transfer, plan_transfers


class TransitionError(ResiHPError):
    """A change of layout that did not keep the state, or on which ranks do not agree."""


@dataclass
class Phases:
    """Seconds of each phase of a transition, in order."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started


@dataclass(frozen=True, kw_only=True)
class Held:
    """The state of this rank under one plan."""

    layout: StateLayout
    buffers: Sequence[DomainBuffer]
    pieces: Sequence[Piece]


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """What a transition moved, over all ranks."""

    bytes: int
    """Sent over the network between ranks."""
    lower_bound_bytes: int
    """What ranks need and lacked."""
    messages: int


def agree(plan: Plan, device: torch.device) -> None:
    """Compares the plan's digest over all live ranks, before anything is changed.

    Raises:
        TransitionError: ranks have different plans.
    """
    digests = exchange_texts(plan.digest, device)
    if len(set(digests)) > 1:
        by_digest: dict[str, list[int]] = {}
        for rank, one in enumerate(digests):
            by_digest.setdefault(one[:12], []).append(rank)
        raise TransitionError(f"ranks have different plans: {by_digest}")


def moved_kinds(moments: Sequence[str], *, sharded: bool, half: bool) -> tuple[str, ...]:
    """Kinds of state that travel; the rest follows from them on the spot.

    Args:
        half: Whether the modules' weights are not fp32.
    """
    if not sharded:
        # Weights are rounded masters.
        return (MASTER, *moments)
    # Weights without the masters to make them from; and fp32 weights are the masters.
    return (WEIGHT, *((MASTER,) if half else ()), *moments)


def _holdings(layout: StateLayout, kind: str) -> Holdings:
    return layout.parameters if kind == WEIGHT else layout.state


def transfers_of(
    old: StateLayout, new: StateLayout, kinds: Sequence[str]
) -> dict[str, tuple[Transfer, ...]]:
    """Who sends what to whom, of every kind."""
    planned: dict[str, tuple[Transfer, ...]] = {}
    for kind in kinds:
        # Masters and moments of an element are in the same places.
        twin = next((one for one in planned if one != WEIGHT and kind != WEIGHT), None)
        planned[kind] = (
            planned[twin] if twin else plan_transfers(_holdings(old, kind), _holdings(new, kind))
        )
    return planned


def move_state(
    old: Held, new: Held, kinds: Sequence[str], *, rank: int, device: torch.device
) -> Moved:
    """Fills the new buffers (and modules) from whoever has what they need; collective."""
    planned = transfers_of(old.layout, new.layout, kinds)
    sources = stores_of(old.buffers, old.pieces, kinds)
    targets = stores_of(new.buffers, new.pieces, kinds)
    for kind, store in targets.items():
        store.take(sources[kind])
    todo = move.messages(planned)
    move.run(todo, rank=rank, sources=sources, targets=targets, device=device)
    return Moved(
        bytes=sum(4 * message.elements for message in todo),
        lower_bound_bytes=lower_bound_bytes(old.layout, new.layout, kinds),
        messages=len(todo),
    )


def lower_bound_bytes(old: StateLayout, new: StateLayout, kinds: Sequence[str]) -> int:
    """Bytes of all elements that a rank needs under the new layout and lacks, counted one by one
    from the holdings and not from any list of transfers."""
    total = 0
    counted: dict[bool, int] = {}
    for kind in kinds:
        weights = kind == WEIGHT
        if weights not in counted:
            before, after = _holdings(old, kind), _holdings(new, kind)
            counted[weights] = sum(
                _lacking(before.get(rank, ()), needed) for rank, needed in after.items()
            )
        total += 4 * counted[weights]
    return total


def _lacking(held: Any, needed: Any) -> int:
    by_tensor: dict[str, list[Any]] = {}
    for slab in held:
        by_tensor.setdefault(slab.tensor, []).append(slab)
    lacking = 0
    for slab in needed:
        common = (slab.intersection(one) for one in by_tensor.get(slab.tensor, ()))
        lacking += slab.elements - sum(one.elements for one in common if one is not None)
    return lacking


def state_digest(held: Held, kinds: Sequence[str], rank: int, device: torch.device) -> list[str]:
    """Digest of each kind of logical state, the same under every layout; collective.

    Every element is counted once: by the owner whose share of its domain it is in.
    """
    mine = dict.fromkeys(kinds, 0)
    for buffer in held.buffers:
        share = shares(buffer.domain)[rank]
        for kind in kinds:
            for slab, values in buffer.entries(kind):
                for part in share:
                    common = slab.intersection(part)
                    if common is not None:
                        mine[kind] += digest(common, values[common.inside(slab)])
    texts = exchange_texts(",".join(str(value) for value in mine.values()), device)
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
) -> dict[str, Any]:
    """The receipt of a transition, for ``receipts/NNN.json``."""
    return {
        "reason": "plan schedule",
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
        "redone_steps": 0,
    }
