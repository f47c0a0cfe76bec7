"""From names of tables and figures to files in a folder.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from resihp_ext.reproduce.figure import Figure, Part, Scale
from resihp_ext.reproduce.page import page, pictures
from resihp_ext.reproduce.pool import run_tasks
from resihp_ext.reproduce.write import write_all


def reproduce(
    parts: Sequence[Part],
    scale: Scale,
    out: Path,
    *,
    jobs: int,
    limit_s: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[Figure, ...]:
    """Makes them, and writes them.

    Args:
        out: A folder, made if it is not there; files of the same names are replaced.
        jobs: Processes.
        limit_s: For all of the work.
        progress: Told how many tasks have ended, of how many.

    Raises:
        ReproduceError: a task has failed, or time is up.
    """
    tasks = list(dict.fromkeys(task for part in parts for task in part.tasks(scale)))
    progress(0, len(tasks))
    results = run_tasks(
        tasks, jobs=jobs, limit_s=limit_s, done=lambda count: progress(count, len(tasks))
    )
    figures = tuple(part.make(part, scale, results) for part in parts)
    write_all(figures, out, page(figures, scale), pictures(figures))
    return figures
