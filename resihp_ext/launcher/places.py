"""The processes of one node, as its supervisor knows them, and how their watch may end.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Place:
    """A local rank and the process that has it."""

    local_rank: int
    rank: int
    pid: int
    incarnation: int
    cpus: Sequence[int] = ()
    running: bool = True
    exit_code: int | None = None
    ended_s: float = 0.0
    armed: bool = False
    newcomer: bool = False
    """Whether the process has come to a job that ran already."""
    left: bool = False
    """Whether the process has said that it ends on purpose."""


@dataclass(frozen=True, slots=True)
class Finished:
    """All workers are done, and no coordinator has to be waited for."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker has failed in a way that would repeat itself."""

    local_rank: int
    pid: int
    exit_code: int
