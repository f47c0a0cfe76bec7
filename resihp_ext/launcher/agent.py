"""The agent of one node: torch's elastic agent, until the workers can survive each other's death.

Rendezvous, start of the first processes, logs, signals and shutdown are torch's. As long as no
worker of the job has said Hello over its control link, so is everything else. From then on
``supervisor.py`` takes over what torch does when a worker ends.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from resihp_ext.control import messages as say
from resihp_ext.errors import EXIT_OK
from resihp_ext.launcher.admission import Admission, JobEndedError
from resihp_ext.launcher.control import JobControl
from resihp_ext.launcher.first_workers import forked_handlers
from resihp_ext.launcher.meeting import JobAddress, JobRunsError
from resihp_ext.launcher.places import Failed, Finished, Place
from resihp_ext.launcher.supervisor import WARM, Supervisor
from resihp_ext.launcher.warm_process import State, WarmProcess
from resihp_ext.launcher.watch import Watch

logger = logging.getLogger(__name__)


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
    admission: Admission
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
            self._options.admission.close()
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
        self._options.admission.admitted(worker_group)

    def _come_late(self, address: JobAddress) -> None:
        """Starts workers for ranks that the coordinator of a running job gives."""
        self._late = self._resilient = True
        group = self._worker_group
        self._options.admission.come_late(group, address)
        for local_rank, pid in self._start_workers(group).items():
            group.workers[local_rank].id = pid
        group.state = WorkerState.HEALTHY

    # Watching

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._resilient and self._may_survive():
            self._options.admission.join(worker_group)
            self._options.admission.announce()
            self._resilient = True
        if self._resilient:
            return self._supervise(worker_group)
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _may_survive(self) -> bool:
        """Whether a worker of this node has said Hello, or, if one has died here, of any node."""
        if self._control.greeted:
            return True
        return self._has_failed() and self._options.admission.runs_elsewhere()

    def _has_failed(self) -> bool:
        handlers = getattr(self._pcontext, "subprocess_handlers", {})
        return any(handler.proc.poll() for handler in handlers.values())

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
        warm = None
        if self._options.warm:
            warm = self._warm_process(context.entrypoint, context.args[0], context.envs[0])
        return Supervisor(
            places=places,
            incarnations=self._incarnations,
            context=context,
            control=self._control,
            watch=self._options.watch,
            warm=warm,
            warm_sign=self._control.sign,
            numa_options=group.spec.numa_options,
        )

    # Starting

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        forks = self._options.warm and isinstance(worker_group.spec.entrypoint, str)
        with forked_handlers(self._begin_warm) if forks else contextlib.nullcontext():
            pids: dict[int, Any] = super()._start_workers(worker_group)
        if self._warm is not None and self._warm.state is State.READY:
            self._control.sign.touch()
        if self._warm is None or self._warm.descriptor is None:
            self._options.watch.discard(WARM)  # it has died meanwhile
        return pids

    def _begin_warm(
        self, entrypoint: str, args: Sequence[Any], env: Mapping[str, str]
    ) -> WarmProcess:
        """The node's warm process, before any worker runs."""
        warm = self._warm_process(entrypoint, args, env)
        descriptor = warm.start_if_due(nice=False)
        if descriptor is not None:
            self._options.watch.add(WARM, descriptor)
        return warm

    def _warm_process(
        self, entrypoint: str, args: Sequence[Any], env: Mapping[str, str]
    ) -> WarmProcess:
        if self._warm is None:
            command = [str(word) for word in (entrypoint, *args)]
            log = Path(self._logs_specs.root_log_dir) / f"warm-{self._control.node_name}.log"
            self._warm = WarmProcess(command, os.environ | dict(env), log)
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
