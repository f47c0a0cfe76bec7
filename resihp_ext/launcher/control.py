"""An agent's side of the control plane: its control thread, and the coordinator if it hosts that.

The control thread calls back; the launcher's main thread, which owns all processes, takes what
was called from a queue.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from resihp_ext.control import messages as say
from resihp_ext.control.frames import new_token
from resihp_ext.control.membership import Membership
from resihp_ext.control.messages import Message
from resihp_ext.control.node import NodeControl
from resihp_ext.control.planner import PlannerProcess
from resihp_ext.control.server import CoordinatorServer, Planner
from resihp_ext.launcher.hosting import TOKEN
from resihp_ext.launcher.limits import Limits
from resihp_ext.launcher.recorder import Recorder
from resihp_ext.launcher.warm import WARM_SIGN

if TYPE_CHECKING:
    from prometheus_client.core import Metric

logger = logging.getLogger(__name__)

SOCKET = "agent.sock"
SIGN = "can-be-warm"


@dataclass(frozen=True, kw_only=True, slots=True)
class Terms:
    """What the launcher was told about the control plane."""

    token: bytes | None
    """From the operator."""
    limits: Limits
    planner: Planner
    address: str
    """Of this host, for the other nodes."""
    folder: Path | None = None
    """Of the job's records, if it keeps any."""


class _Owner:
    """Callbacks of the control thread, as messages in a queue."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.queue: SimpleQueue[Message] = SimpleQueue()
        self.greeted_once = threading.Event()
        self._ring = ring

    def _put(self, message: Message) -> None:
        self.queue.put(message)
        self._ring()

    def greeted(self, hello: say.Hello) -> None:
        self.greeted_once.set()
        self._put(hello)

    def said(self, message: say.Armed | say.Leaving) -> None:
        self._put(message)

    def gone(self, rank: int, incarnation: int) -> None:
        self._ring()

    def assigned(self, ranks: tuple[int, ...]) -> None:
        self._put(say.Assigned(ranks=ranks))

    def replace(self, rank: int, incarnation: int) -> None:
        self._put(say.Replace(rank=rank, incarnation=incarnation))

    def kill(self, rank: int, cause: str) -> None:
        self._put(say.Kill(rank=rank, cause=cause))

    def restart(self, cause: str) -> None:
        self._put(say.Restart(cause=cause))

    def end(self, exit_code: int, cause: str) -> None:
        self._put(say.EndNode(exit_code=exit_code, cause=cause[:1000]))


class JobControl:
    """Control links of one agent; all methods are for the main thread."""

    def __init__(self, *, node: str, terms: Terms, ring: Callable[[], None]) -> None:
        self.node_name = node
        self.terms = terms
        self.token = terms.token or b""
        self.joined = False
        """Whether the coordinator knows this node."""
        self.attempt = 0
        """Which start of all workers this is."""
        # A short path in a folder of our own: socket paths are limited to about 100 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="resihp-", dir="/tmp"))
        self._owner = _Owner(ring)
        self._node: NodeControl | None = None
        self._server: CoordinatorServer | None = None

    @property
    def sign(self) -> Path:
        """Exists once a worker's script has shown that it can be kept warm."""
        return self.folder / SIGN

    @property
    def greeted(self) -> bool:
        """Whether a worker of this node has ever said Hello."""
        return self._owner.greeted_once.is_set()

    def host(self) -> tuple[str, int]:
        """Starts the coordinator, once; returns its address and port.

        Raises:
            OSError, ResiHPError: it cannot be started.
        """
        if self._server is None:
            self.token = self.terms.token or new_token()
            planner = self.terms.planner
            self._server = CoordinatorServer(
                token=self.token,
                host=self.terms.address,
                membership=Membership(self.terms.limits.rules),
                planner=planner,
                prepare=getattr(planner, "prepare", lambda _need: None),
                on_end=self._owner.end,
                record=Recorder(self.terms.folder),
                limits=self.terms.limits.server,
            )
            return self._server.start()
        return self._server.address

    @property
    def hosts(self) -> bool:
        """Whether the coordinator is here."""
        return self._server is not None

    def open(self) -> None:
        """Listens for this node's workers; :attr:`token` must be known.

        Raises:
            OSError, ResiHPError: the socket cannot be made.
        """
        if self._node is not None:
            with contextlib.suppress(Exception):
                self._node.close()
        self._node = NodeControl(
            node=self.node_name,
            token=self.token,
            socket_path=self.folder / SOCKET,
            owner=self._owner,
            limits=self.terms.limits.node,
        )
        self._node.start()

    def join(
        self,
        where: tuple[str, int],
        ranks: tuple[int, ...],
        slots: int,
        *,
        world_size: int = 0,
        attempt: int = 0,
    ) -> None:
        """Makes this node known to the coordinator; again when its ranks have changed.

        Raises:
            ResiHPError: the coordinator cannot be reached.
        """
        assert self._node is not None
        if self.hosts and isinstance(self.terms.planner, PlannerProcess):
            self.terms.planner.start()
        hello = say.NodeHello(
            node=self.node_name,
            address=self.terms.address,
            ranks=ranks,
            slots=slots,
            world_size=world_size,
            attempt=attempt,
        )
        self._node.join(*where, hello)
        self.joined = True

    def environment(self, incarnation: int, *, joins: bool) -> dict[str, str]:
        """Variables of a worker."""
        return {
            "RESIHP_AGENT": str(self.folder / SOCKET),
            TOKEN: self.token.hex(),
            "RESIHP_INCARNATION": str(incarnation),
            "RESIHP_ATTEMPT": str(self.attempt),
            "RESIHP_NODE": self.node_name,
            "RESIHP_AGENT_PID": str(os.getpid()),
            WARM_SIGN: str(self.sign),
        } | ({"RESIHP_JOINS": "1"} if joins else {})

    def started(self, rank: int, incarnation: int) -> None:
        """A process was started."""
        if self._node is not None:
            self._node.started(rank, incarnation)

    def exited(self, message: say.Exited) -> None:
        """A process has ended."""
        if self._node is not None:
            self._node.exited(message.rank, message.incarnation, message.cause, message.exit_code)

    def heard(self) -> list[Message]:
        """What was called since the last time."""
        found: list[Message] = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._owner.queue.get_nowait())
        return found

    def metrics(self, wait_s: float) -> Iterator[Metric]:
        """What this node says of itself, and, if it hosts the coordinator, of the job; from any
        thread.

        Args:
            wait_s: How long each of the two may take to tell.

        Raises:
            ResiHPError, TimeoutError: one of them does not answer.
        """
        # Imported late: only who has a port for metrics needs it.
        from resihp_ext.telemetry.families import job_families, node_families

        node, server = self._node, self._server
        if node is not None:
            yield from node_families(node.facts(wait_s), self.node_name)
        if server is not None:
            yield from job_families(server.status(wait_s))

    def close(self) -> None:
        """Ends the threads and removes the socket."""
        for one in (self._node, self._server):
            if one is not None:
                try:
                    one.close()
                except Exception:
                    logger.exception("the control plane did not end in order")
        if isinstance(self.terms.planner, PlannerProcess):
            self.terms.planner.close()
        shutil.rmtree(self.folder, ignore_errors=True)
