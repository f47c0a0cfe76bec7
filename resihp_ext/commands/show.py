"""``resihp status``: what the coordinator says, for people or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from resihp_ext.commands.job import EXIT_OVER, OVER, RunningJob
from resihp_ext.commands.picture import as_text
from resihp_ext.errors import EXIT_OK


def show(directory: Path, *, as_json: bool) -> tuple[str, int]:
    """Text and exit code.

    Raises:
        UserError: it is no job's directory.
        JobOverError, UnreachableError: there is no coordinator to ask.
    """
    job = RunningJob.find(directory)
    status, where = job.status(), job.where
    exit_code = EXIT_OVER if status["phase"] in OVER else EXIT_OK
    if as_json:
        place = {"node": where.node, "address": where.address, "port": where.port}
        return json.dumps({**status, "coordinator": place}), exit_code
    return as_text(status, host=where.node, place=f"{where.address}:{where.port}"), exit_code
