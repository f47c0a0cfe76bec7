"""Each fault strikes once a job: who strikes it creates ``faults/NAME.done`` first.

A file outlives processes: survivors that repeat a step, replacements, and a resumed job all see it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from resihp_ext.errors import UserError
from resihp_ext.faults.fault import Fault
from resihp_ext.faults.read import faults_to_yaml


def done_path(folder: Path, name: str) -> Path:
    """Where it is written that a fault has struck."""
    return folder / f"{name}.done"


def was_done(folder: Path, name: str, fault: Fault) -> bool:
    """Whether a fault has struck.

    Raises:
        UserError: what is written there is of another fault: the list was changed.
    """
    path = done_path(folder, name)
    try:
        told = json.loads(path.read_text())["fault"]
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):
        return True  # who wrote it did not get to the end
    if told != as_text(fault):
        raise UserError(
            f"{path}: was done by another list of faults ({told}); remove {folder}, or give "
            "another --resilience-dir"
        )
    return True


def claim(folder: Path, name: str, fault: Fault, **circumstances: Any) -> bool:
    """Whether it is up to this process to strike: at most one ever gets True."""
    try:
        descriptor = os.open(done_path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    told = {"fault": as_text(fault), "time_s": time.time(), "pid": os.getpid(), **circumstances}
    os.write(descriptor, json.dumps(told).encode() + b"\n")
    os.close(descriptor)
    return True


def as_text(fault: Fault) -> str:
    """One line: an entry of a file of faults."""
    return faults_to_yaml([fault]).removeprefix("- ").strip()
