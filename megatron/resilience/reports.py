"""What an executor writes into the event log of its own accord, beside the steps themselves."""

from __future__ import annotations

from megatron.resilience.executor.executor import Executor
from megatron.resilience.timing.config import TimingConfig
from megatron.resilience.timing.report import report_times
from megatron.resilience.upstream.arguments import current_args
from resihp_ext.events import Event, EventLog


def report_steps(executor: Executor | None, events: EventLog | None, timing: TimingConfig) -> None:
    """Lets an executor report times of steps, and micro-batches that have moved in them."""
    report_times(executor, events, timing)
    if executor is None or events is None or not executor.migrations.delta:
        return
    log, ran, migrations = events, executor.after_pass, executor.migrations

    def write() -> None:
        ran()
        step = int(current_args().curr_iteration) + 1
        for move in migrations.moved_here():
            log.write(
                Event.MIGRATED,
                step=step,
                micro_batch=move.micro_batch,
                source=str(move.source),
                target=str(move.target),
            )

    executor.after_pass = write
