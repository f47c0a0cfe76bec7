"""What the agent of a node tells a worker of the control plane: the only place where it is read.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from resihp_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerEnvironment:
    """A worker's way to its agent."""

    socket: str
    """``RESIHP_AGENT``: path of the agent's Unix socket."""
    token: bytes = field(repr=False)
    """``RESIHP_TOKEN``: the job's token, as hexadecimal digits."""
    incarnation: int = 0
    """``RESIHP_INCARNATION``: processes that had this rank before."""
    attempt: int = 0
    """``RESIHP_ATTEMPT``: which start of all workers this is; the same for all of them."""
    joins: bool = False
    """``RESIHP_JOINS``: whether the job already runs."""
    node: str = ""
    """``RESIHP_NODE``: name of the node."""
    agent_pid: int | None = None
    """``RESIHP_AGENT_PID``: the agent's process."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Self | None:
        """Reads it from ``environ``; None for a worker without an agent.

        Raises:
            UserError: a value that no agent sets.
        """
        if not environ.get("RESIHP_AGENT"):
            return None
        pid = environ.get("RESIHP_AGENT_PID")
        try:
            return cls(
                socket=environ["RESIHP_AGENT"],
                token=bytes.fromhex(environ.get("RESIHP_TOKEN", "")),
                incarnation=int(environ.get("RESIHP_INCARNATION", "0")),
                attempt=int(environ.get("RESIHP_ATTEMPT", "0")),
                joins=environ.get("RESIHP_JOINS") == "1",
                node=environ.get("RESIHP_NODE", ""),
                agent_pid=int(pid) if pid else None,
            )
        except ValueError as error:
            raise UserError(f"environment: RESIHP_*: {error}; use resihp-run") from error
