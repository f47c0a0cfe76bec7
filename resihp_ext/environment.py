"""Who this process is: the only place where rank and rendezvous variables are read.

Launchers (``resihp-run``, torchrun, a Slurm prolog) tell a process its place through the
environment. Reading it once, into frozen data, means that the rest of the code takes a
:class:`RankEnvironment` instead of peeking at ``os.environ``, and that a malformed value is
reported as one line that names the variable.

Promise: pure (the mapping is passed in), imports neither torch nor Megatron.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from resihp_ext.errors import UserError

HIGHEST_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """Place of one process in the job; the default is a job of one process."""

    rank: int = 0
    """``RANK``: the global rank, 0 <= rank < world_size."""
    local_rank: int = 0
    """``LOCAL_RANK``: index among this node's processes, also the index of its GPU."""
    world_size: int = 1
    """``WORLD_SIZE``: processes in the whole job."""
    local_world_size: int = 1
    """``LOCAL_WORLD_SIZE``: processes on this node."""
    group_rank: int = 0
    """``GROUP_RANK``: index of this node's launcher among the launchers."""
    master_addr: str | None = None
    """``MASTER_ADDR``: host of the rendezvous store; None when no launcher named one."""
    master_port: int | None = None
    """``MASTER_PORT``: TCP port of the rendezvous store; None when no launcher named one."""

    def __post_init__(self) -> None:
        _require_at_least("WORLD_SIZE", self.world_size, 1)
        _require_at_least("LOCAL_WORLD_SIZE", self.local_world_size, 1)
        _require_at_least("GROUP_RANK", self.group_rank, 0)
        _require_index("RANK", self.rank, "WORLD_SIZE", self.world_size)
        _require_index("LOCAL_RANK", self.local_rank, "LOCAL_WORLD_SIZE", self.local_world_size)
        if self.local_world_size > self.world_size:
            raise UserError(
                f"environment: LOCAL_WORLD_SIZE={self.local_world_size} is larger than "
                f"WORLD_SIZE={self.world_size}; start the job with resihp-run"
            )
        if self.master_port is not None and not 0 < self.master_port <= HIGHEST_PORT:
            raise UserError(
                f"environment: MASTER_PORT={self.master_port} is not a TCP port; "
                f"use 1 to {HIGHEST_PORT}"
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self:
        """Read the place of this process from ``environ`` (normally ``os.environ``).

        Without ``RANK`` and ``WORLD_SIZE`` it is a job of one process. Without the ``LOCAL_*``
        variables the whole job is taken to run on one node. An empty value counts as unset.

        Raises:
            UserError: a value is not a whole number or out of range, or only one of ``RANK`` and
                ``WORLD_SIZE`` is set; the line names the variable.
        """
        rank = _optional_number(environ, "RANK")
        world_size = _optional_number(environ, "WORLD_SIZE")
        if (rank is None) != (world_size is None):
            present, absent = ("WORLD_SIZE", "RANK") if rank is None else ("RANK", "WORLD_SIZE")
            raise UserError(
                f"environment: {present} is set but {absent} is not; set both, or start the job "
                "with resihp-run"
            )
        rank = 0 if rank is None else rank
        world_size = 1 if world_size is None else world_size
        local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size)
        # Modulo only when it can be one: __post_init__ reports a size below 1 by name.
        own_index = rank % local_world_size if local_world_size > 0 else 0
        return cls(
            rank=rank,
            local_rank=_number(environ, "LOCAL_RANK", own_index),
            world_size=world_size,
            local_world_size=local_world_size,
            group_rank=_number(environ, "GROUP_RANK", 0),
            master_addr=environ.get("MASTER_ADDR", "").strip() or None,
            master_port=_optional_number(environ, "MASTER_PORT"),
        )


def _optional_number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise UserError(
            f"environment: {name}={text!r} is not a whole number; unset it or start the job with "
            "resihp-run"
        ) from None


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    value = _optional_number(environ, name)
    return default if value is None else value


def _require_at_least(name: str, value: int, lowest: int) -> None:
    if value < lowest:
        raise UserError(f"environment: {name}={value} is too small; the least is {lowest}")


def _require_index(name: str, value: int, size_name: str, size: int) -> None:
    if not 0 <= value < size:
        raise UserError(
            f"environment: {name}={value} is outside 0..{size - 1} ({size_name}={size}); "
            "start the job with resihp-run"
        )


@contextmanager
def world_of(environ: MutableMapping[str, str], world_size: int | None) -> Iterator[None]:
    """Lets code that reads ``WORLD_SIZE`` itself see another size; None changes nothing."""
    before = environ.get("WORLD_SIZE")
    if world_size is not None:
        environ["WORLD_SIZE"] = str(world_size)
    try:
        yield
    finally:
        if before is not None:
            environ["WORLD_SIZE"] = before
        elif world_size is not None:
            environ.pop("WORLD_SIZE")
