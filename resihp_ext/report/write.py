"""``resihp report``: the page of a run, written whole or not at all.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from resihp_ext.errors import UserError
from resihp_ext.report.changes import layouts, overview
from resihp_ext.report.page import page, section
from resihp_ext.report.pipeline import pipeline
from resihp_ext.report.run import Run, read_run
from resihp_ext.report.story import decisions, figures, over_time, sentences


def as_page(run: Run) -> str:
    """The whole page."""
    parts = [section("In figures", figures(run))]
    for title, inside in (
        ("Over time", over_time(run)),
        ("Decisions", decisions(run)),
        ("A step", pipeline(run)),
    ):
        if inside:
            parts.append(section(title, inside))
    parts.insert(2, overview(run))
    parts.append(layouts(run))
    name = run.folder.resolve()
    title = f"{name.parent.name}/{name.name}" if name.parent.name else name.name
    return page(title, sentences(run), [one for one in parts if one], badges=run.badges)


def write_report(folder: Path, out: Path | None) -> Path:
    """Writes the page; returns where.

    Args:
        folder: Of the run.
        out: Default: ``report.html`` in the folder.

    Raises:
        UserError: there is no run, or the page cannot be written.
    """
    path = out or folder / "report.html"
    write_whole(path, as_page(read_run(folder)))
    return path


def write_whole(path: Path, text: str) -> None:
    """Writes a file so that nobody ever sees a part of it.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            os.chmod(name, 0o644)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give a place that can be written") from error
