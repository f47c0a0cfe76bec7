"""Which node is the first of a round, where somebody has said which one hosts the rendezvous.

torch numbers the nodes of a round by their names. The first one has the workers' store and the
job's coordinator: a second host whose loss ends the job, beside that of the rendezvous' store.
Where a node was told to be that host (``is_host=1``, as under Slurm), it becomes the first.

Only torch's public interface of a rendezvous is used; the protocol is two notes and a counter.
"""

from __future__ import annotations

import contextlib
import socket
from datetime import timedelta
from typing import Any

from torch.distributed import DistError, PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

COMING = "host/coming"
THERE = "host/there"
FIRST = "first"
ARRIVED = "arrived"
DECIDED = "decided"
HOST_S = 30.0
"""For the host to join a round, after it has started the store; then the others go on without."""
AGREE_S = 60.0
"""For all nodes of a round to say whether they are the host."""


class HostSign:
    """How others know that the host takes part: before it has, they would fill the round.

    Args:
        store: Of all rounds.
        is_host: Whether this node was told to host the store.
    """

    def __init__(self, store: Store, *, is_host: bool) -> None:
        self._store, self.is_host = store, is_host
        self._joined = False
        if is_host:
            store.set(COMING, "1")

    def joined(self) -> None:
        """This node is in torch's list of those who take part."""
        if self.is_host and not self._joined:
            self._joined = True
            self._store.set(THERE, "1")

    def wait(self) -> None:
        """Returns once the host has joined, if there is one, or after :data:`HOST_S`."""
        with contextlib.suppress(DistError):  # a lost store is torch's to report
            if not self.is_host and self._store.check([COMING]):
                self._store.wait([THERE], timedelta(seconds=HOST_S))


class HostFirst(RendezvousHandler):
    """A rendezvous of torch's in which the host is number 0; the others keep their order."""

    def __init__(self, inner: RendezvousHandler, sign: HostSign, local_addr: str | None) -> None:
        self._inner, self._sign = inner, sign
        self._address = local_addr or socket.getfqdn()  # as torch would
        self._server: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """As torch's.

        Raises:
            DistError: not all nodes of the round have answered.
        """
        self._sign.wait()
        try:
            found = self._inner.next_rendezvous()
        finally:
            self._sign.joined()  # or it never will: the others are not to wait for it
        # Not torch's own keys: the same names stand there already.
        store = PrefixStore("resihp/first", found.store)
        first = self._agree(found, store)
        if first == 0:
            return found
        rank = 0 if found.rank == first else found.rank + (found.rank < first)
        workers_store = RendezvousStoreInfo.build(
            rank,
            store,
            local_addr=self._address,
            server_port=self._port() if rank == 0 and self.use_agent_store else None,
        )
        return RendezvousInfo(found.store, rank, found.world_size, workers_store)

    def _agree(self, found: RendezvousInfo, store: Any) -> int:
        """torch's number of the node that is to be the first."""
        if self._sign.is_host:
            store.set(FIRST, str(found.rank))
        # Who counts last knows that the host, if it is in this round, has spoken.
        if store.add(ARRIVED, 1) == found.world_size:
            store.set(DECIDED, store.get(FIRST) if store.check([FIRST]) else "0")
        store.wait([DECIDED], timedelta(seconds=AGREE_S))
        return int(store.get(DECIDED))

    def _port(self) -> int:
        if self._server is None:
            self._server = TCPStore(self._address, 0, is_master=True, wait_for_workers=False)
        return int(self._server.port)

    # As torch's

    @property
    def use_agent_store(self) -> bool:
        return bool(self._inner.use_agent_store)

    def get_backend(self) -> str:
        return str(self._inner.get_backend())

    def is_closed(self) -> bool:
        return bool(self._inner.is_closed())

    def set_closed(self) -> None:
        inner: Any = self._inner  # untyped there
        inner.set_closed()

    def num_nodes_waiting(self) -> int:
        return int(self._inner.num_nodes_waiting())

    def get_run_id(self) -> str:
        return str(self._inner.get_run_id())

    def shutdown(self) -> bool:
        return bool(self._inner.shutdown())
