"""``resihp top`` as lines: from a look at a job to what fits into a terminal.

Pure. Nodes and ranks that are alike share a row; where there is no room for all rows, those that
are as they should be go first. Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from rich.text import Text

from resihp_ext.commands.look import Look
from resihp_ext.commands.picture import HEADER, columns, head_lines, node_rows, printable, ranges
from resihp_ext.events import Event
from resihp_ext.plan.plan import Instance, Plan

RANK_HEADER = ("ranks", "node", "state", "place", "layers", "micro-batches", "p")
EVENTS = 5
PACE_STEPS = 20
"""Of the last so many steps the median time is shown."""
LEAST_ROWS = 3
"""Of a table, however small the terminal."""
DEAD, SLOW, DIM, BOLD = "bold red", "yellow", "dim", "bold"
FINE = ("member",)
"""States of a rank that need no attention."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of a table."""

    cells: tuple[str, ...]
    style: str = ""
    """How it is drawn; none if all is well."""


def frame(look: Look, *, width: int, height: int | None = None) -> list[Text]:
    """All lines of a frame.

    Args:
        look: At the job.
        width: Columns; longer lines are cut.
        height: Lines of the terminal; None: as many as there are.
    """
    head = _head(look)
    foot = [*_receipts(look), *_events(look)]
    nodes, ranks = _nodes(look), rank_rows(look)
    if height is not None:
        foot = foot[: max(0, height - len(head) - 2 * (LEAST_ROWS + 3))]
        # Below each of the two tables there is an empty line, above it a header.
        room = max(2 * LEAST_ROWS, height - len(head) - len(foot) - 5)
        most = max(LEAST_ROWS, room // 3, room - len(ranks))
        nodes = fitted(nodes, most, "nodes")
        ranks = fitted(ranks, room - len(nodes), "groups of ranks")
    lines = [*head, Text(), *_table(HEADER, nodes), Text(), *_table(RANK_HEADER, ranks), *foot]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines if height is None else lines[:height]


def fitted(rows: list[Row], most: int, what: str) -> list[Row]:
    """At most so many rows, in their order; the last one says what is left out."""
    if len(rows) <= most:
        return rows
    odd = [place for place, row in enumerate(rows) if row.style]
    fine = [place for place, row in enumerate(rows) if not row.style]
    kept = sorted([*odd, *fine][: max(0, most - 1)])
    hidden = [rows[place] for place in range(len(rows)) if place not in set(kept)]
    well = "" if any(row.style for row in hidden) else ", all well"
    note = Row((f"... {len(hidden)} more {what}{well}",), DIM)
    return [*(rows[place] for place in kept), note]


# The parts of a frame


def _head(look: Look) -> list[Text]:
    first, *others = head_lines(look.status, host=look.host, place=look.place)
    clock = time.strftime("%H:%M:%S", time.localtime(look.at_s))
    phase = look.status["phase"]
    lines = [_text(f"{first}   {clock}", BOLD if phase == "running" else f"{BOLD} yellow")]
    lines += [_text(line) for line in others]
    if look.status["refused"]:
        lines.append(_text(f"refused: {look.status['refused']}", SLOW))
    if pace := _pace(look.events):
        lines.append(_text(pace))
    return lines


def _pace(events: Sequence[Mapping[str, Any]]) -> str:
    """Losses of the last step, and what a step takes."""
    steps = [one for one in events if one["event"] == Event.ITERATION]
    if not steps:
        return ""
    last = steps[-1]
    losses = last.get("losses")
    parts = [f"step {last.get('step')}"]
    if isinstance(losses, Mapping):
        parts += [f"{name} {_figure(value)}" for name, value in losses.items()]
    times = [float(b["time_s"]) - float(a["time_s"]) for a, b in pairwise(steps[-PACE_STEPS - 1 :])]
    if times:
        parts.append(f"{statistics.median(times):.3g} s a step")
    return ", ".join(parts)


def _nodes(look: Look) -> list[Row]:
    found = []
    for cells in node_rows(look.status):
        state = cells[HEADER.index("state")]
        style = "" if state == "takes part" else DEAD if state == "lost" else SLOW
        found.append(Row(cells, style))
    return found


def rank_rows(look: Look) -> list[Row]:
    """Ranks by node, state, place in the plan and throughput; alike ones in one row."""
    groups: dict[tuple[str, ...], list[int]] = {}
    plan, idle = look.plan, set(look.status.get("standby", ()))
    p_of = {} if plan is None else {device.rank: device.p for device in plan.devices}
    # The coordinator knows more of those who train: what is measured, too.
    p_of |= {int(rank): p for rank, p in look.status.get("speeds", {}).items()}
    visits = {} if plan is None else _visits(plan)
    for name, node in look.status["nodes"].items():
        for text, slot in node["ranks"].items():
            rank = int(text)
            place = _place(plan, rank, visits) if slot["state"] in FINE else ("-", "-", "-")
            state = "standby" if rank in idle and slot["state"] in FINE else slot["state"]
            p = f"{p_of[rank]:.2f}" if rank in p_of else "-"
            groups.setdefault((name, state, *place, p), []).append(rank)
    return [
        Row((ranges(ranks), *key), _style(key[1], key[-1]))
        for key, ranks in sorted(groups.items(), key=lambda each: min(each[1]))
    ]


def _style(state: str, p: str) -> str:
    if state == "lost":
        return DEAD
    healthy = p == "-" or float(p) >= 1.0
    return "" if healthy and state in (*FINE, "standby") else SLOW


def _visits(plan: Plan) -> dict[Instance, int]:
    found: dict[Instance, int] = {}
    for route in plan.routes:
        for one in route:
            found[one] = found.get(one, 0) + 1
    return found


def _place(plan: Plan | None, rank: int, visits: Mapping[Instance, int]) -> tuple[str, str, str]:
    """Replica and stage, layers, micro-batches; several stages of a rank beside each other."""
    held = () if plan is None else plan.instances_of(rank)
    if plan is None or not held:
        return "-", "-", "-"
    stages = ranges(one.stage for one in held)
    layers = ", ".join(_span(*plan.stage(one).layers) for one in held)
    share = f"{visits.get(held[0], 0)} of {plan.micro_batches}"
    return f"replica {held[0].replica} stage {stages}", layers, share


def _span(first: int, end: int) -> str:
    return str(first) if end - first == 1 else f"{first}-{end - 1}"


def _receipts(look: Look) -> list[Text]:
    if not look.receipts:
        return []
    rows = [
        (
            f"{number:03d}",
            f"after step {one.get('step', '?')}",
            f"plan {one.get('from_version', '?')} to {one.get('to_version', '?')}",
            f"{_figure(one.get('total_s'), '.2f')} s",
            f"{_mib(one.get('moved_bytes'))} moved",
            str(one.get("reason", "")),
        )
        for number, one in sorted(look.receipts.items(), reverse=True)
    ]
    return [Text(), _text("receipts", DIM), *map(_text, columns(rows))]


def _events(look: Look) -> list[Text]:
    """The latest first; of a row of steps only the last."""
    shown: list[Mapping[str, Any]] = []
    for one in reversed(look.events):
        repeated = shown and shown[-1]["event"] == one["event"] == Event.ITERATION
        if len(shown) == EVENTS:
            break
        if not repeated:
            shown.append(one)
    if not shown:
        return []
    rows = [
        (_clock(one), f"step {one.get('step')}", str(one["event"]), _told(one)) for one in shown
    ]
    return [Text(), _text("events", DIM), *map(_text, columns(rows))]


def _told(event: Mapping[str, Any]) -> str:
    match event["event"]:
        case Event.ITERATION:
            return _pace([event]).partition(", ")[2]
        case Event.TRANSITION:
            why = event.get("reason", "")
            return f"plan {event.get('from_version')} to {event.get('to_version')}: {why}"
        case Event.JOB_START:
            layout = event.get("layout")
            degrees = layout.items() if isinstance(layout, Mapping) else ()
            return ", ".join(f"{name} {degree}" for name, degree in degrees)
        case Event.JOB_END:
            return f"rank {event.get('rank')}"
    return ""


# Texts


def _table(header: Sequence[str], rows: Sequence[Row]) -> list[Text]:
    width = len(header)
    whole = [row for row in rows if len(row.cells) == width]
    lines = iter(columns([header, *(row.cells for row in whole)]))
    found = [_text(next(lines), DIM)]
    for row in rows:
        text = next(lines) if len(row.cells) == width else row.cells[0]
        found.append(_text(text, row.style))
    return found


def _text(line: str, style: str = "") -> Text:
    return Text(printable(line), style=style, no_wrap=True)


def _figure(value: object, form: str = ".4g") -> str:
    if isinstance(value, int | float) and math.isfinite(value):
        return format(value, form)
    return "?" if value is None else str(value)


def _mib(value: object) -> str:
    return f"{value / 2**20:.1f} MiB" if isinstance(value, int | float) else "?"


def _clock(event: Mapping[str, Any]) -> str:
    at_s = event.get("time_s")
    known = isinstance(at_s, int | float) and math.isfinite(at_s)
    return time.strftime("%H:%M:%S", time.localtime(at_s)) if known else "--:--:--"


def plain(lines: Iterable[Text]) -> str:
    """Without colours."""
    return "\n".join(line.plain.rstrip() for line in lines)
