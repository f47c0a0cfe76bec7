"""What one rank has measured of one step: the input of everything that looks for slowness.

All clocks are those of the rank that measured; ``begun_s`` alone is in seconds since the epoch.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

import msgspec

from resihp_ext.plan.action import Action, Kind

Key = tuple[Kind, int, int]
"""What names an action of a rank: kind, micro-batch, chunk."""


class MicroBatch(msgspec.Struct, frozen=True, array_like=True):
    """What decides how long a micro-batch takes."""

    number: int
    """In the global batch."""
    tokens: int
    squared: int
    """Sum of the squared segment lengths."""


class TimedAction(msgspec.Struct, frozen=True, array_like=True):
    """One action of a program, as it was executed."""

    kind: Kind
    micro_batch: int
    """-1 for SYNC and STEP."""
    chunk: int
    start_s: float
    """Since the rank's step began."""
    own_s: float
    """Spent on own work: without waiting for other ranks."""
    wait_s: float
    """Spent waiting: for a message, or for partners of the tensor-parallel group or sync domain,
    with what they then do together."""

    @property
    def end_s(self) -> float:
        """When it was over, since the rank's step began."""
        return self.start_s + self.own_s + self.wait_s


class RankStep(msgspec.Struct, frozen=True, array_like=True):
    """One step of one rank."""

    rank: int
    step: int
    """From 1, as logs count them."""
    version: int
    """Of the plan that ran."""
    begun_s: float
    """Seconds since the epoch."""
    total_s: float
    """From the end of the rank's step before to the end of this one: what a person would call
    the time of an iteration, without checkpoints and evaluations between the two."""
    actions: tuple[TimedAction, ...]
    """In the order of execution."""
    micro_batches: tuple[MicroBatch, ...]
    """Those that this rank has run."""


class PackedStep(msgspec.Struct, frozen=True, array_like=True):
    """The same without the names of the actions: what a rank sends to whoever watches many.

    The names are those of the plan's program, which both ends have. A thousand ranks are read
    about twenty times as fast as from :class:`RankStep`, and nothing is lost.
    """

    rank: int
    step: int
    version: int
    begun_s: float
    total_s: float
    times: bytes
    """``start_s``, ``own_s`` and ``wait_s`` of each action of the rank's program, in its order, as
    little-endian doubles; NaN where nothing was measured."""
    micro_batches: bytes
    """Number, tokens and squared of each, as little-endian integers of 8 bytes."""


def keys_of(actions: Iterable[Action]) -> tuple[Key, ...]:
    """The names of a program's actions."""
    return tuple((a.kind, a.micro_batch, a.chunk) for a in actions)


def pack(step: RankStep, keys: tuple[Key, ...]) -> PackedStep:
    """Packs a step of a rank whose program has the actions ``keys``; others are dropped."""
    work = [x for m in step.micro_batches for x in (m.number, m.tokens, m.squared)]
    return PackedStep(
        rank=step.rank,
        step=step.step,
        version=step.version,
        begun_s=step.begun_s,
        total_s=step.total_s,
        times=pack_times(step.actions, keys),
        micro_batches=struct.pack(f"<{len(work)}q", *work),
    )


def pack_times(actions: tuple[TimedAction, ...], keys: tuple[Key, ...]) -> bytes:
    """Times of the actions in the order of ``keys``."""
    if tuple([(a.kind, a.micro_batch, a.chunk) for a in actions]) == keys:
        times = [x for a in actions for x in (a.start_s, a.own_s, a.wait_s)]
    else:
        found = {(a.kind, a.micro_batch, a.chunk): (a.start_s, a.own_s, a.wait_s) for a in actions}
        nothing = (float("nan"),) * 3
        times = [x for key in keys for x in found.get(key, nothing)]
    return struct.pack(f"<{len(times)}d", *times)
