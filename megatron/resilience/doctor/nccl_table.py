"""NCCL versions with defects that matter for recovery. Data only; ``check_nccl`` judges.

Recovery aborts the communicators that a dead rank has left hanging. A version whose abort hangs
turns a death that survivors could absorb into a lost job. Add an entry with its public source.
"""

from dataclasses import dataclass
from enum import StrEnum


class Affects(StrEnum):
    """Which call misbehaves."""

    ABORT = "abort"
    """``ncclCommAbort``: recovery depends on it."""
    SHRINK = "shrink"
    """``ncclCommShrink`` with abort: this project does not call it, other tools do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownBad:
    """An inclusive range of versions with one defect."""

    first: tuple[int, int, int]
    last: tuple[int, int, int] | None
    """None: every later version as well, as far as is known."""
    affects: Affects
    reason: str
    source: str


KNOWN_BAD = (
    KnownBad(
        first=(2, 25, 1),
        last=(2, 25, 1),
        affects=Affects.ABORT,
        reason="aborting a communicator hangs",
        source="pytorch/pytorch#149153",
    ),
    KnownBad(
        first=(2, 28, 3),
        last=(2, 28, 8),
        affects=Affects.ABORT,
        reason="excluded by nvidia-resiliency-ext for its in-process abort",
        source="nvidia-resiliency-ext, supported NCCL versions",
    ),
    KnownBad(
        first=(2, 31, 0),
        last=None,
        affects=Affects.SHRINK,
        reason="shrinking with abort hangs",
        source="pytorch/pytorch#194775, #194679",
    ),
)
