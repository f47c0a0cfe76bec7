"""How a node becomes part of a job: in a round of the rendezvous, or late, at the coordinator."""

from __future__ import annotations

import dataclasses
import logging
import time
from datetime import timedelta
from typing import Any

from torch.distributed.elastic.agent.server.api import Worker, WorkerGroup

from resihp_ext.control import messages as say
from resihp_ext.errors import EXIT_REQUEUE, ResiHPError
from resihp_ext.launcher.control import JobControl
from resihp_ext.launcher.hosting import AddressFile
from resihp_ext.launcher.meeting import COORDINATOR, Beacon, JobAddress, Meeting
from resihp_ext.launcher.watch import Watch

logger = logging.getLogger(__name__)

AGREE_S = 60.0
"""For the first node of a round to start the coordinator."""
ASSIGN_S = 60.0
"""For the coordinator to give ranks to a node that has come late."""


class JobEndedError(Exception):
    """The coordinator has ended the job, or this node's part in it."""

    def __init__(self, exit_code: int, cause: str) -> None:
        super().__init__(cause)
        self.exit_code = exit_code


class Admission:
    """One agent's way into the job; its control links are opened here."""

    def __init__(
        self,
        control: JobControl,
        meeting: Meeting,
        watch: Watch,
        address_file: AddressFile | None,
    ) -> None:
        self._control, self._meeting, self._watch = control, meeting, watch
        self._file = address_file
        self._address: JobAddress | None = None
        self._beacon: Beacon | None = None

    # In a round

    def admitted(self, group: WorkerGroup) -> None:
        """The rendezvous is complete: all agree on a coordinator, before workers are started.

        Raises:
            OSError, ResiHPError, DistError: the control links cannot be opened.
        """
        assert group.store is not None
        self._meeting.admitted(group.store)
        address = self._agree(group)
        known, self._address = self._address, address
        self._control.attempt = address.attempt
        if self._control.joined:
            self.join(group)
        elif known is None or known.coordinator != address.coordinator:
            self._control.token = bytes.fromhex(address.token) or self._control.token
            self._control.open()

    def _agree(self, group: WorkerGroup) -> JobAddress:
        """Where the coordinator is: the first node of the round hosts it, or knows it already."""
        store: Any = group.store
        if group.group_rank == 0:
            address = self._address if self._control.joined else None
            attempt = self._meeting.next_attempt()
            address = dataclasses.replace(address or self._host(group), attempt=attempt)
            store.set(COORDINATOR, address.to_json())
            return address
        store.wait([COORDINATOR], timedelta(seconds=AGREE_S))
        return JobAddress.from_json(store.get(COORDINATOR))

    def _host(self, group: WorkerGroup) -> JobAddress:
        host, port = self._control.host()
        handed_out = self._control.terms.token is not None
        return JobAddress(
            host=host,
            port=port,
            token="" if handed_out or self._meeting.one_node else self._control.token.hex(),
            world_size=group.workers[0].world_size,
            master_addr=group.master_addr or "",
            master_port=group.master_port or 0,
        )

    def join(self, group: WorkerGroup) -> None:
        """Makes this node and its ranks known to the coordinator.

        Raises:
            ResiHPError: it cannot be reached.
        """
        assert self._address is not None
        ranks = tuple(worker.global_rank for worker in group.workers)
        self._control.join(
            self._address.coordinator,
            ranks,
            len(ranks),
            world_size=group.workers[0].world_size,
            attempt=self._address.attempt,
        )

    def announce(self) -> None:
        """Workers survive from now on: nobody is admitted to the rendezvous any more."""
        assert self._address is not None
        if self._meeting.notes is not None:
            self._meeting.notes.say_running(self._address)
        if not self._control.hosts:
            return
        if self._meeting.endpoint is not None:
            self._beacon = Beacon(self._meeting.endpoint, self._address)
            self._beacon.start()
        if self._file is not None:
            try:
                self._file.write(self._address.coordinator, self._control.token)
            except OSError as error:
                logger.warning("resihp status will not find this job: %s", error)

    def runs_elsewhere(self) -> bool:
        """Whether a worker of any node has said Hello."""
        notes = self._meeting.notes
        return notes is not None and notes.running() is not None

    # Late

    def come_late(self, group: WorkerGroup, address: JobAddress) -> None:
        """Fills ``group`` with the ranks that the coordinator of a running job gives this node.

        Raises:
            JobEndedError: the job is over, or out of reach.
            ResiHPError: this node does not know the job's token.
        """
        self._address = address
        self._control.token = self._control.terms.token or bytes.fromhex(address.token)
        if not self._control.token:
            raise ResiHPError("the job's token was handed out: give --control-token-file here, too")
        self._control.open()
        slots = group.spec.local_world_size
        try:
            self._control.join(address.coordinator, (), slots)
        except ResiHPError as error:
            raise JobEndedError(
                EXIT_REQUEUE, f"the job that runs is out of reach: {error}"
            ) from None
        ranks = self._assigned()
        world_size = max(address.world_size, *(rank + 1 for rank in ranks))
        group.workers = [
            Worker(
                local_rank=k,
                global_rank=rank,
                role_rank=rank,
                world_size=world_size,
                role_world_size=world_size,
            )
            for k, rank in enumerate(ranks)
        ]
        facts: Any = group
        facts.store = self._meeting.store
        facts.group_rank = ranks[0] // slots
        facts.group_world_size = max(facts.group_rank + 1, world_size // slots)
        facts.master_addr, facts.master_port = address.master_addr, address.master_port

    def _assigned(self) -> tuple[int, ...]:
        until_s = time.monotonic() + ASSIGN_S
        while time.monotonic() < until_s:
            self._watch.wait(1.0)
            for message in self._control.heard():
                if isinstance(message, say.Assigned):
                    return message.ranks
                if isinstance(message, say.EndNode):
                    raise JobEndedError(message.exit_code, message.cause)
        cause = f"the coordinator of the job has given no ranks within {ASSIGN_S:g} s"
        raise JobEndedError(EXIT_REQUEUE, cause)

    def close(self) -> None:
        """Removes what would lead others here."""
        if self._beacon is not None:
            self._beacon.close()
        if self._file is not None and self._control.hosts:
            self._file.remove()
