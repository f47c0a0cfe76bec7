"""Where agents meet: torch's rendezvous, and what a running job leaves there for late ones.

torch's rendezvous admits nodes in rounds, and a node that comes to a complete round makes all
others stop and meet again. A job whose workers survive must not be disturbed like that: once it
is under way, its coordinator's address stands in the store, and whoever comes goes there instead.

Trust: who can reach the rendezvous store can read and change everything in it, torch's state as
well as ours; it belongs on a network of the cluster.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    registry,
)
from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend as c10d
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from resihp_ext.launcher.first_node import HostFirst, HostSign

logger = logging.getLogger(__name__)

PREFIX = "resihp"
RUNNING = "running"
COORDINATOR = "coordinator"
ATTEMPTS = "attempts"
BEACON_S = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class JobAddress:
    """How to reach a job."""

    host: str
    port: int
    """Of the coordinator."""
    token: str
    """Hexadecimal; empty when the operator hands it out."""
    world_size: int
    master_addr: str
    master_port: int
    """Of the workers' store."""
    attempt: int = 0
    """How often the nodes of this job have met."""

    @property
    def coordinator(self) -> tuple[str, int]:
        """Where it listens."""
        return self.host, self.port

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes | str) -> JobAddress:
        """Inverse of :meth:`to_json`.

        Raises:
            ValueError, TypeError: the text is something else.
        """
        return cls(**json.loads(text))


class JobRunsError(Exception):
    """The job is under way; it takes newcomers at its coordinator."""

    def __init__(self, address: JobAddress) -> None:
        super().__init__(f"the job runs; its coordinator is at {address.host}:{address.port}")
        self.address = address


class Notes:
    """What the agents of a job leave in the store, whatever the round of the rendezvous."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def running(self) -> JobAddress | None:
        """The job that is under way, if its workers survive deaths."""
        if not self._store.check([RUNNING]):
            return None
        return JobAddress.from_json(self._store.get(RUNNING))

    def say_running(self, address: JobAddress) -> None:
        """From now on a death anywhere ends no worker elsewhere, and nobody is admitted here."""
        self._store.set(RUNNING, address.to_json())


class _Backend(c10d.C10dRendezvousBackend):
    """torch's state of the rendezvous; it ends the wait of a node that is late."""

    def __init__(self, store: Store, run_id: str, notes: Notes, sign: HostSign) -> None:
        super().__init__(store, run_id)
        self._notes, self._sign = notes, sign
        self.admitted = False
        """Whether this node has been in a round: then it may meet the others again."""

    def get_state(self) -> Any:
        if not self.admitted and (address := self._notes.running()) is not None:
            raise JobRunsError(address)
        return super().get_state()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        done = super().set_state(state, token)
        if done is not None and done[2]:
            self._sign.joined()  # the first thing that a node writes is that it takes part
        return done


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the rendezvous has its store."""

    host: str
    port: int
    run_id: str


class Beacon:
    """Says in every store that comes up at the endpoint that the job runs.

    The host of the store may be lost without harm to a job whose coordinator is elsewhere. When
    it comes back it brings an empty store, and would wait in it for the others for ever.
    """

    def __init__(self, endpoint: Endpoint, address: JobAddress) -> None:
        self._endpoint, self._address = endpoint, address
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rendezvous beacon", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends it, within a moment unless the network hangs."""
        self._closed.set()
        self._thread.join(2 * BEACON_S)

    def _run(self) -> None:
        store: TCPStore | None = None
        while not self._closed.wait(BEACON_S):
            try:
                if store is None:
                    store = self._connected()
                _own_part(store, self._endpoint.run_id).set(RUNNING, self._address.to_json())
            except (OSError, RuntimeError) as error:  # torch's errors are RuntimeErrors
                logger.info("no rendezvous store: %s", error)
                store = None

    def _connected(self) -> TCPStore:
        where = self._endpoint.host, self._endpoint.port
        # torch would complain on stderr at every failure.
        socket.create_connection(where, BEACON_S).close()
        return TCPStore(*where, is_master=False, timeout=timedelta(seconds=5 * BEACON_S))


def _own_part(store: Store, run_id: str) -> Store:
    return PrefixStore(f"{PREFIX}/{run_id}", store)


class Meeting:
    """The rendezvous of one agent."""

    def __init__(self, params: RendezvousParameters) -> None:
        self.notes: Notes | None = None
        self.store: Store | None = None
        """Of all rounds."""
        self.one_node = params.max_nodes == 1
        self._backend: _Backend | None = None
        self.handler: RendezvousHandler
        self.endpoint: Endpoint | None = None
        """Where another store would be found, once the one that there is has gone."""
        if params.backend == "c10d":
            if not self.one_node and params.get("store_type", "tcp") == "tcp":
                where = parse_rendezvous_endpoint(params.endpoint, c10d.DEFAULT_PORT)
                self.endpoint = Endpoint(*where, params.run_id)
            # As torch's registry does it, but the store stays at hand.
            _, store = c10d.create_backend(params)
            self.store = _own_part(store, params.run_id)
            self.notes = Notes(self.store)
            sign = HostSign(self.store, is_host=bool(params.get_as_bool("is_host")))
            self._backend = _Backend(store, params.run_id, self.notes, sign)
            inner = create_handler(store, self._backend, params)
            self.handler = HostFirst(inner, sign, params.local_addr)
        else:
            self.handler = registry.get_rendezvous_handler(params)

    def next_attempt(self) -> int:
        """Counts the rounds; for the first node of each."""
        assert self.store is not None
        return int(self.store.add(ATTEMPTS, 1))

    def admitted(self, store: Store) -> None:
        """This node takes part; ``store`` is that of the round."""
        if self._backend is not None:
            self._backend.admitted = True
        if self.notes is None:
            self.store = PrefixStore(PREFIX, store)
            self.notes = Notes(self.store)
