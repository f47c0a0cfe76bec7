"""Runs this node's part of a job: what torch's ``launch_agent`` sets up, around our agent."""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.distributed.elastic import events, metrics
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from resihp_ext.control.ask import Invitation
from resihp_ext.control.server import Planner
from resihp_ext.launcher.admission import Admission, JobEndedError
from resihp_ext.launcher.agent import NodeAgent, Options
from resihp_ext.launcher.control import JobControl, Terms
from resihp_ext.launcher.hosting import AddressFile, NodeName, own_address, resilience_dir
from resihp_ext.launcher.limits import Limits
from resihp_ext.launcher.meeting import Meeting
from resihp_ext.launcher.watch import Watch

if TYPE_CHECKING:
    from resihp_ext.telemetry.endpoint import Endpoint

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Extras:
    """What the launcher knows beyond torch's ``LaunchConfig``."""

    token: bytes | None
    limits: Limits
    planner: Planner
    script_args: Sequence[str]
    invitation: Invitation
    metrics: Endpoint | None
    """Where this node's metrics are asked for."""
    adopts: bool
    """Whether this process becomes the parent of orphaned descendants."""


def launch(config: LaunchConfig, entrypoint: Any, args: Sequence[str], extras: Extras) -> None:
    """Runs until this node's part is done.

    Raises:
        ChildFailedError: a worker failed, and nothing survives that.
        JobEndedError: the coordinator has ended the job with an exit code other than 0.
        SignalException: the launcher was told to stop.
        RendezvousError, DistError, ResiHPError: this node could not take part.
    """
    config.run_id = config.run_id or str(uuid.uuid4().int)
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = config.signals_to_handle
    params = RendezvousParameters(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        run_id=config.run_id,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        local_addr=config.local_addr,
        **config.rdzv_configs,
    )
    name = NodeName(config.run_id)
    watch = Watch()
    try:
        meeting = Meeting(params)
        spec = _spec(config, entrypoint, args, meeting)
        options = _options(config, extras, meeting, watch, name)
        agent = NodeAgent(
            spec,
            config.logs_specs or DefaultLogsSpecs(),
            options,
            start_method=config.start_method,
            log_line_prefix_template=config.log_line_prefix_template,
            shutdown_timeout=config.shutdown_timeout,
        )
        _run(agent, config, _name_of(entrypoint, args))
    finally:
        watch.close()
        name.close()


def _spec(
    config: LaunchConfig, entrypoint: Any, args: Sequence[str], meeting: Meeting
) -> WorkerSpec:
    master: tuple[str | None, int | None] = (None, None)
    if config.rdzv_backend == "static":
        master = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=entrypoint,
        args=tuple(args),
        rdzv_handler=meeting.handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=master[0],
        master_port=master[1],
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
        duplicate_stdout_filters=config.duplicate_stdout_filters,
        duplicate_stderr_filters=config.duplicate_stderr_filters,
        virtual_local_rank=config.virtual_local_rank,
    )


def _options(
    config: LaunchConfig, extras: Extras, meeting: Meeting, watch: Watch, name: NodeName
) -> Options:
    endpoint_host, _ = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=0)
    folder = resilience_dir(extras.script_args)
    terms = Terms(
        token=extras.token,
        limits=extras.limits,
        planner=extras.planner,
        address=own_address(endpoint_host, config.local_addr),
        folder=folder,
    )
    control = JobControl(node=name.text, terms=terms, ring=watch.ring)
    if extras.metrics is not None:
        extras.metrics.show(control.metrics)
    file = None if folder is None else AddressFile(folder, name.text, extras.invitation)
    return Options(
        control=control,
        watch=watch,
        admission=Admission(control, meeting, watch, file),
        warm=extras.adopts,
    )


def _run(agent: NodeAgent, config: LaunchConfig, name: str) -> None:
    metrics.initialize_metrics(metrics.MetricsConfig(config.metrics_cfg))
    closes = True
    try:
        # None: there was no room for this node, and the job is over without it.
        result: RunResult | None = agent.run()
        events.record(agent.get_event_succeeded(), config.event_log_handler)
        if result is not None and result.is_failed():
            raise ChildFailedError(name=name, failures=result.failures)
    except (SignalException, JobEndedError):
        # Others may go on, and this node may come back to them.
        closes = False
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    except ChildFailedError:
        raise
    except Exception:
        events.record(agent.get_event_failed(), config.event_log_handler)
        raise
    finally:
        if closes and not agent.is_resilient:
            agent.get_worker_group().spec.rdzv_handler.shutdown()


def _name_of(entrypoint: Any, args: Sequence[str]) -> str:
    if not isinstance(entrypoint, str):
        return str(getattr(entrypoint, "__name__", ""))
    if entrypoint == sys.executable:
        return next((arg for arg in args if not arg.startswith("-")), "")
    return entrypoint
