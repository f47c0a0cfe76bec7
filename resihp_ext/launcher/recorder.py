"""Writes the coordinator's events into the job's ``events.jsonl``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import logging
from pathlib import Path

from resihp_ext.control.actions import Record
from resihp_ext.errors import UserError
from resihp_ext.events import EventLog

logger = logging.getLogger(__name__)


class Recorder:
    """Opens the file for each event: they are few, and nobody has to close it."""

    def __init__(self, folder: Path | None) -> None:
        """None: the job keeps no records."""
        self._folder = folder

    def __call__(self, record: Record) -> None:
        """Appends an event; a folder that cannot be written is no reason to end a job."""
        if self._folder is None:
            return
        try:
            log = EventLog(self._folder, rank=None)
        except UserError as error:
            logger.warning("%s", error)
            return
        log.write(record.event, step=record.step, **record.fields)
        log.close()
