"""``resihp plan`` from its settings to its output: text or JSON, a plan, a trace.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from resihp_ext.errors import UserError
from resihp_ext.whatif.answer import Answer, answer
from resihp_ext.whatif.keys import NAMES
from resihp_ext.whatif.scene import scene
from resihp_ext.whatif.settings import Settings, read_file

EXIT_INFEASIBLE = 3
"""The question is sound, and no layout of the live devices holds the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Where an answer goes."""

    as_json: bool = False
    plan: Path | None = None
    trace: Path | None = None


def ask(flags: Mapping[str, Sequence[str]], file: Path | None) -> Answer:
    """Answers the question of some flags and a file.

    Raises:
        UserError: bad input, one line.
        InfeasibleError: no layout of the live devices holds the model; one line.
    """
    return answer(scene(Settings.of(flags, read_file(file, NAMES) if file else {})))


def tell(found: Answer, outputs: Outputs) -> None:
    """Writes files first: where one cannot be written nothing is printed.

    Raises:
        UserError: a file cannot be written.
    """
    plan = found.decision.plan
    if outputs.plan:
        _write("--out", outputs.plan, plan.to_json() + "\n")
    if outputs.trace:
        from resihp_ext.whatif.trace import trace_json

        _write("--trace", outputs.trace, trace_json(found.scene.faulty, plan))
    sys.stdout.write(_text(found, as_json=outputs.as_json))


def _text(found: Answer, *, as_json: bool) -> str:
    # Only what is shown is imported.
    if as_json:
        from resihp_ext.whatif.as_json import as_json as one_line

        return one_line(found) + "\n"
    from resihp_ext.whatif.report import console, text

    return text(found, console())


def _write(flag: str, path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise UserError(f"{flag} {path}: {error.strerror}; choose another file") from error
