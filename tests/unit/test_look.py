"""What ``resihp top`` reads in a job's directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from resihp_ext.commands.look import latest_events
from resihp_ext.events import Event, EventLog

pytestmark = pytest.mark.unit


def test_times_and_work_of_ranks_are_no_news(tmp_path: Path) -> None:
    log = EventLog(tmp_path, rank=0)
    log.write(Event.JOB_START, step=0)
    for kind in (Event.MICRO_BATCHES, Event.STEP_TIMES, Event.ITERATION, Event.STEP_TIMES):
        log.write(kind, step=1)
    log.close()
    assert [one["event"] for one in latest_events(tmp_path)] == ["job_start", "iteration"]
