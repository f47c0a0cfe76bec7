"""The agent of one node: torch's elastic agent, until the workers can survive each other's death.

Rendezvous, start of the first processes, logs, signals and shutdown are torch's. As long as no
worker of the job has said Hello over its control link, so is everything else. From then on
``supervisor.py`` takes over what torch does when a worker ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from resihp_ext.control import messages as say
from resihp_ext.errors import EXIT_OK, ResiHPError
from resihp_ext.launcher.control import JobControl
from resihp_ext.launcher.hosting import AddressFile
from resihp_ext.launcher.meeting import COORDINATOR, JobAddress, JobRunsError, Meeting
from resihp_ext.launcher.supervisor import Failed, Finished, Place, Supervisor
from resihp_ext.launcher.warm_process import WarmProcess
from resihp_ext.launcher.watch import Watch

logger = logging.getLogger(__name__)

ASSIGN_S = 60.0
"""For the coordinator to give ranks to a node that has come late."""


class JobEndedError(Exception):
    """The coordinator has ended the job, or this node's part in it."""

    def __init__(self, exit_code: int, cause: str) -> None:
        super().__init__(cause)
        self.exit_code = exit_code


class WorkerVariables(LogsSpecs):
    """torch's log destinations; on the way, every worker's environment gets our variables."""

    def __init__(self, inner: LogsSpecs) -> None:
        self._inner = inner
        self.agent: NodeAgent

    @property
    def root_log_dir(self) -> str:
        return str(self._inner.root_log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for env in envs.values():
            env.update(self.agent.variables(int(env["RANK"])))
        return self._inner.reify(envs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What an agent needs beyond torch's own."""

    control: JobControl
    watch: Watch
    meeting: Meeting
    address_file: AddressFile | None
    warm: bool
    """Whether forked workers of a warm process come to the launcher."""


class NodeAgent(LocalElasticAgent):
    """torch's agent whose workers may survive each other."""

    def __init__(self, spec: WorkerSpec, logs: LogsSpecs, options: Options, **torchs: Any) -> None:
        variables = WorkerVariables(logs)
        variables.agent = self
        super().__init__(spec, variables, **torchs)
        self._options = options
        self._control = options.control
        self._incarnations: dict[int, int] = {}
        self._late = False
        self._address: JobAddress | None = None
        self._warm: WarmProcess | None = None
        self._resilient = False
        """Whether deaths are survived; never taken back."""
        self.over = False
        """Whether the coordinator has said that the job is over."""

    @property
    def is_resilient(self) -> bool:
        """Whether a worker of the job has ever said Hello."""
        return self._resilient

    def variables(self, rank: int) -> dict[str, str]:
        """Environment of a worker that is about to be started."""
        if not isinstance(self._worker_group.spec.entrypoint, str):
            return {}  # started by fork, as a function: torch keeps these to itself
        self._incarnations[rank] = self._incarnations.get(rank, -1) + 1
        return self._control.environment(self._incarnations[rank], joins=self._late)

    def run(self, role: str = "") -> RunResult:
        """As torch's; afterwards nothing of ours is left."""
        try:
            result: RunResult = super().run(role)
            return result
        finally:
            if self._warm is not None:
                self._warm.close()
            if self._options.address_file is not None and self._control.hosts:
                self._options.address_file.remove()
            self._control.close()

    def _invoke_run(self, role: str = "") -> RunResult:
        try:
            result: RunResult = super()._invoke_run(role)
            return result
        except JobRunsError as found:
            self._come_late(found.address)
            return self._supervise(self._worker_group)

    # Meeting the others

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        super()._rendezvous(worker_group)
        if worker_group.store is None:
            raise AssertionError
        self._options.meeting.admitted(worker_group.store)
        address = self._agree(worker_group)
        if address != self._address and not self._control.joined:
            self._control.token = bytes.fromhex(address.token) or self._control.token
            self._control.open()
            self._address = address
        if self._control.joined:
            self._join(worker_group)

    def _agree(self, group: WorkerGroup) -> JobAddress:
        """Where the coordinator of this round is; the first node hosts it, or knows."""
        store = group.store
        assert store is not None
        if group.group_rank == 0:
            address = self._address if self._control.joined and self._address else self._host(group)
            store.set(COORDINATOR, address.to_json())
            return address
        store.wait([COORDINATOR], timedelta(seconds=ASSIGN_S))
        return JobAddress.from_json(store.get(COORDINATOR))

    def _host(self, group: WorkerGroup) -> JobAddress:
        host, port = self._control.host()
        handed_out = self._control.terms.token is not None
        alone = group.group_world_size == 1 and self._options.meeting.one_node
        return JobAddress(
            host=host,
            port=port,
            token="" if handed_out or alone else self._control.token.hex(),
            world_size=group.workers[0].world_size,
            master_addr=group.master_addr or "",
            master_port=group.master_port or 0,
        )

    def _join(self, group: WorkerGroup) -> None:
        assert self._address is not None
        ranks = tuple(worker.global_rank for worker in group.workers)
        where = self._address.host, self._address.port
        self._control.join(where, ranks, len(ranks), group.workers[0].world_size)

    def _come_late(self, address: JobAddress) -> None:
        """Takes ranks from the coordinator of a job that runs, and starts workers for them."""
        self._late = self._resilient = True
        self._address = address
        self._control.token = self._control.terms.token or bytes.fromhex(address.token)
        if not self._control.token:
            raise ResiHPError("the job runs with a token of its operator's: --control-token-file")
        self._control.open()
        group: Any = self._worker_group
        slots = group.spec.local_world_size
        self._control.join((address.host, address.port), (), slots)
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
        group.store = self._options.meeting.store
        group.group_rank = ranks[0] // slots
        group.group_world_size = max(group.group_rank + 1, world_size // slots)
        group.master_addr, group.master_port = address.master_addr, address.master_port
        for local_rank, pid in self._start_workers(group).items():
            group.workers[local_rank].id = pid
        group.state = WorkerState.HEALTHY

    def _assigned(self) -> tuple[int, ...]:
        deadline = ASSIGN_S
        while deadline > 0:
            self._options.watch.wait(1.0)
            deadline -= 1.0
            for message in self._control.heard():
                if isinstance(message, say.Assigned):
                    return message.ranks
                if isinstance(message, say.EndNode):
                    raise JobEndedError(message.exit_code, message.cause)
        raise ResiHPError(f"the job's coordinator has given no ranks within {ASSIGN_S:g} s")

    # Watching

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._resilient and self._may_survive():
            self._join(worker_group)
            self._announce()
            self._resilient = True
        if self._resilient:
            return self._supervise(worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _may_survive(self) -> bool:
        """Whether a worker of this node has said Hello, or, if one has died here, of any node."""
        if self._control.greeted:
            return True
        notes = self._options.meeting.notes
        if notes is None or not self._has_failed():
            return False
        return notes.running() is not None

    def _has_failed(self) -> bool:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return any(handler.proc.poll() for handler in handlers.values())

    def _announce(self) -> None:
        """From now on nobody is admitted to the rendezvous of this job."""
        assert self._address is not None
        notes = self._options.meeting.notes
        if notes is not None:
            notes.say_running(self._address)
        if self._control.hosts and self._options.address_file is not None:
            try:
                self._options.address_file.write(
                    host=self._address.host,
                    port=self._address.port,
                    token=self._control.token,
                    run_id=self._worker_group.spec.rdzv_handler.get_run_id(),
                )
            except OSError as error:
                logger.warning("resihp status will not find this job: %s", error)

    def _supervise(self, group: WorkerGroup) -> RunResult:
        while True:
            supervisor = self._supervisor(group)
            verdict = supervisor.run()
            match verdict:
                case say.Restart():
                    # Not bounded here: all nodes count together, at the coordinator.
                    self._remaining_restarts -= 1
                    self._restart_workers(group)
                case say.EndNode(exit_code=exit_code, cause=cause):
                    self.over = True
                    if exit_code != EXIT_OK:
                        raise JobEndedError(exit_code, cause)
                    return self._succeeded(group)
                case Failed():
                    return self._failed(group, verdict)
                case Finished():
                    return self._succeeded(group)

    def _supervisor(self, group: WorkerGroup) -> Supervisor:
        context: Any = self._pcontext
        places = {}
        for worker in group.workers:
            handler = context.subprocess_handlers[worker.local_rank]
            cpus: tuple[int, ...] = ()
            with contextlib.suppress(OSError):
                cpus = tuple(sorted(os.sched_getaffinity(handler.proc.pid)))
            rank = worker.global_rank
            places[worker.local_rank] = Place(
                local_rank=worker.local_rank,
                rank=rank,
                pid=handler.proc.pid,
                incarnation=self._incarnations[rank],
                cpus=cpus,
                newcomer=self._late,
            )
            self._control.started(rank, self._incarnations[rank])
        return Supervisor(
            places=places,
            incarnations=self._incarnations,
            context=context,
            control=self._control,
            watch=self._options.watch,
            warm=self._warm_process(context),
            warm_sign=self._control.sign,
            numa_options=group.spec.numa_options,
        )

    def _warm_process(self, context: Any) -> WarmProcess | None:
        if self._warm is None and self._options.warm:
            command = [str(word) for word in (context.entrypoint, *context.args[0])]
            env = os.environ | context.envs[0]
            log = Path(self._logs_specs.root_log_dir) / f"warm-{self._control.node_name}.log"
            self._warm = WarmProcess(command, env, log)
        return self._warm

    # The end

    def _succeeded(self, group: WorkerGroup) -> RunResult:
        ranks = (worker.global_rank for worker in group.workers)
        return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(ranks))

    def _failed(self, group: WorkerGroup, failed: Failed) -> RunResult:
        self._remaining_restarts = 0
        context: Any = self._pcontext
        failure = ProcessFailure(
            local_rank=failed.local_rank,
            pid=failed.pid,
            exitcode=failed.exit_code,
            error_file=context.error_files[failed.local_rank],
        )
        rank = group.workers[failed.local_rank].global_rank
        return RunResult(state=WorkerState.FAILED, failures={rank: failure})

    def _exit_barrier(self) -> None:
        if not self.over and not self._late:
            super()._exit_barrier()  # type: ignore[no-untyped-call]
