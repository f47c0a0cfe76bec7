"""``resihp receipts``: what has happened to a job, as its folder keeps it.

Reads ``receipts/NNN.json`` and ``plans/NNN.json``; the job may run, or be over. Imports neither
torch nor Megatron.
"""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from resihp_ext.commands.picture import printable
from resihp_ext.errors import UserError
from resihp_ext.plan.parts import PlanError
from resihp_ext.plan.plan import Plan
from resihp_ext.whatif.layout import Cell, Layout, layout, ranges, standby
from resihp_ext.whatif.picture import CELLS, pictures
from resihp_ext.whatif.report import console

SHORTEST_S = 0.005
"""Shorter phases are not listed."""
AFTERWARDS = {"catch_up": "older steps again", "repeat": "the step again"}
"""Phases that a receipt's total is without: work that is done once more."""
NOTICE = "notice"
"""Phase before all that a receipt's total covers; known of faults on purpose only."""
OWNERS = "owners"
"""Where the state of a change without losses comes from."""
WIDEST, NARROWEST = 100, 60

Receipt = dict[str, Any]


def read_receipts(folder: Path) -> list[Receipt]:
    """All receipts of a job, in order.

    Args:
        folder: ``--resilience-dir``.

    Raises:
        UserError: it has no plans, or a receipt is damaged.
    """
    if not (folder / "plans").is_dir():
        raise UserError(f"{folder}: no plans/ in it; give the --resilience-dir of a job")
    return [_read(path) for path in sorted((folder / "receipts").glob("[0-9]*.json"))]


def _read(path: Path) -> Receipt:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error
    wanted = ("step", "from_version", "to_version", "reason", "total_s", "phases_s", "moved_bytes")
    lacking = [key for key in wanted if not isinstance(found, dict) or key not in found]
    if lacking:
        raise UserError(f"{path}: not a receipt, it lacks {', '.join(lacking)}")
    return dict(found)


def show(folder: Path, *, as_json: bool) -> str:
    """The text that the verb prints.

    Raises:
        UserError: as :func:`read_receipts`.
    """
    receipts = read_receipts(folder)
    if as_json:
        return json.dumps(receipts)
    width = max(NARROWEST, min(WIDEST, shutil.get_terminal_size((WIDEST, 0)).columns))
    return "\n".join(printable(line) for line in as_lines(folder, receipts, width))


def as_lines(folder: Path, receipts: list[Receipt], width: int) -> Iterator[str]:
    """Plans, and between them what led from one to the next."""
    ran = receipts[0]["from_version"] if receipts else 0
    before = read_plan(folder, ran)
    yield from _plan_lines(before, ran, before, width)
    for receipt in receipts:
        yield from _receipt_lines(receipt, width)
        after = read_plan(folder, receipt["to_version"])
        yield from _plan_lines(after, receipt["to_version"], before, width)
        before = after


def read_plan(folder: Path, version: int) -> Plan | None:
    """One plan of a job; None if it was not kept."""
    try:
        text = (folder / "plans" / f"{version:03d}.json").read_text(encoding="utf-8")
        return Plan.from_json(text)
    except (OSError, ValueError, PlanError):
        return None


def _plan_lines(plan: Plan | None, version: int, before: Plan | None, width: int) -> Iterator[str]:
    if plan is None:
        yield f"plan {version} was not kept"
        return
    p_of = {device.rank: device.p for device in plan.devices}
    cells = layout(plan, p_of, before or plan)
    yield f"plan {version}"
    small = sum(map(len, cells)) <= CELLS
    yield from _rows(cells, plan.micro_batches, width) if small else _picture(cells, width)
    idle, dead = standby(plan, p_of), [rank for rank, p in sorted(p_of.items()) if p <= 0]
    if idle:
        yield f"  standby     {ranges(idle)}"
    if dead:
        yield f"  dead        {ranges(dead)}"


def _rows(cells: Layout, micro_batches: int, width: int) -> Iterator[str]:
    """A line a replica; columns are stages."""
    texts = [[_cell(cell) for cell in row] for row in cells]
    places = range(max(map(len, texts)))
    widths = [max(len(row[place]) for row in texts if place < len(row)) for place in places]
    for number, (row, shown) in enumerate(zip(cells, texts, strict=True)):
        stages = "   ".join(map(str.ljust, shown, widths))
        counts = ", ".join(map(str, dict.fromkeys(cell.micro_batches for cell in row)))
        line = f"  replica {number}   {stages}   {counts} of {micro_batches} micro-batches"
        yield from [line] if len(line) <= width else _wrapped(line, width, "", " " * 14)


def _picture(cells: Layout, width: int) -> Iterator[str]:
    """Of a large layout, where neighbours that are alike share a row or a column."""
    out = console()
    out.width = width
    with out.capture() as captured:
        for table in pictures(cells, width):
            out.print(table)
    yield from (line.rstrip() for line in captured.get().splitlines())


def _cell(cell: Cell) -> str:
    """``[0-1] layers 0-2``; a star where the ranks hold something else than before."""
    first, last = cell.layers[0], cell.layers[1] - 1
    layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    return f"[{ranges(cell.ranks)}] {layers}{' *' * cell.changed}"


def _receipt_lines(receipt: Mapping[str, Any], width: int) -> Iterator[str]:
    title = f"after step {receipt['step']}: {receipt['reason']}"
    yield from _wrapped(title, width, "", "  ")
    if "fault" in receipt:
        yield from _wrapped(f"on purpose: {receipt['fault']['fault']}", width, "    ", "      ")
    yield from _wrapped(_phases(receipt), width, "    ", "      ")
    yield from _wrapped(_work(receipt), width, "    ", "      ")


def _wrapped(text: str, width: int, first: str, others: str) -> list[str]:
    return textwrap.wrap(text, width, initial_indent=first, subsequent_indent=others)


def _phases(receipt: Mapping[str, Any]) -> str:
    """Seconds in all, and of what; then what was done once more."""
    seconds = receipt["phases_s"]
    parts = [
        f"{name} {value:.2f}"
        for name, value in seconds.items()
        if name not in {NOTICE, *AFTERWARDS} and value >= SHORTEST_S
    ]
    again = [
        f"{text} {seconds[name]:.2f} s" for name, text in AFTERWARDS.items() if name in seconds
    ]
    end = f"; then {', '.join(again)}" if again else ""
    begin = f"noticed after {seconds[NOTICE]:.2f} s; " if NOTICE in seconds else ""
    return f"{begin}{receipt['total_s']:.2f} s ({', '.join(parts)}){end}"


def _work(receipt: Mapping[str, Any]) -> str:
    again = receipt.get("redone_steps", 0)
    moved, least = receipt["moved_bytes"], receipt.get("lower_bound_bytes")
    parts = [f"{moved / 2**20:.1f} MiB moved"]
    if least is not None:
        parts[0] += " (the least possible)" if moved == least else f" of {least / 2**20:.1f}"
    source = receipt.get("source", OWNERS)
    if source != OWNERS:
        parts.insert(0, f"state from {source}")
    parts.append(f"{again} step{'s' * (again != 1)} done again" if again else "no step done again")
    if receipt.get("state_digests"):
        parts.append("state verified")
    return ", ".join(parts)
