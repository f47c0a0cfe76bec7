"""``resihp status`` for people: a status of the coordinator as lines.

Pure: from what :meth:`RunningJob.status` gives to text.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

SHOWN_RECOVERIES = 5
CAUSE_CHARACTERS = 160

TAKE_PART = ("member", "going", "entering")
GONE = ("lost", "away", "left")
HEADER = ("node", "address", "state", "heard", "ranks")


def as_text(status: Mapping[str, Any], *, host: str = "", place: str = "") -> str:
    """All lines.

    Args:
        status: Of a job.
        host: Node that hosts the coordinator.
        place: Where that listens.
    """
    lines = head_lines(status, host=host, place=place)
    lines += ["", *columns([HEADER, *node_rows(status)]), ""]
    if status["refused"]:
        lines.append(f"refused: {status['refused']}")
    lines += _recoveries(status)
    if status["dropped"]:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(status["dropped"].items()))
        lines.append(f"dropped messages: {kinds}")
    while not lines[-1]:
        lines.pop()
    return "\n".join(map(printable, lines))


def head_lines(status: Mapping[str, Any], *, host: str = "", place: str = "") -> list[str]:
    """What the job as a whole is doing, and who coordinates it; arguments of :func:`as_text`."""
    lines = [_headline(status)]
    if status["under_way"]:
        lines.append(f"under way: {status['under_way']}")
    if status["cause"]:
        lines.append(f"ends with exit code {status['exit_code']}: {status['cause']}")
    lines.append(f"coordinator: {f'node {host}, ' if host else ''}{place}")
    return lines


def printable(line: str) -> str:
    """Without what would move a terminal's cursor: causes may quote anybody."""
    return "".join(char if char.isprintable() else "?" for char in line)


def ranges(ranks: Iterable[int]) -> str:
    """``0-3, 7``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def ranks_are(ranks: Sequence[int], one: str, several: str) -> str:
    """``rank 3 is ...`` or ``ranks 3-5 are ...``; the verb's two forms are given."""
    many = len(ranks) != 1
    return f"rank{'s' if many else ''} {ranges(ranks)} {several if many else one}"


def ranks_in(node: Mapping[str, Any], states: Iterable[str]) -> list[int]:
    """Ranks of a node that are in one of some states."""
    wanted = set(states)
    return [int(rank) for rank, slot in node["ranks"].items() if slot["state"] in wanted]


def state_of(node: Mapping[str, Any]) -> str:
    """What a node as a whole is doing, in a word or two."""
    states = {slot["state"] for slot in node["ranks"].values()}
    taking_part = bool(states & set(TAKE_PART))
    if not node["alive"]:
        return "lost"
    if node["drained"]:
        if taking_part:
            return "cannot be spared" if node["kept"] else "leaving"
        return "drained"
    if node["quarantined"]:
        return "quarantined"
    if taking_part:
        return "takes part"
    if "starting" in states:
        return "starting"
    return "joining" if states & {"preparing", "ready"} else "without ranks"


def _headline(status: Mapping[str, Any]) -> str:
    ranks = sum(len(node["ranks"]) for node in status["nodes"].values())
    recoveries = status["recoveries"]
    return (
        f"{status['phase']}: step {status['step']}, epoch {status['epoch']}, "
        f"{len(status['members'])} of {ranks} ranks take part, "
        f"{recoveries} {'recovery' if recoveries == 1 else 'recoveries'}"
    )


def node_rows(status: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """A row a node, below :data:`HEADER`."""
    rows: list[tuple[str, ...]] = []
    for name, node in sorted(status["nodes"].items(), key=lambda each: _first_rank(each[1])):
        ago_s = status["heard_ago_s"].get(name)
        heard = "-" if ago_s is None else f"{ago_s:.1f} s ago"
        rows.append((name, node["address"], state_of(node), heard, _ranks(node)))
    return rows


def _first_rank(node: Mapping[str, Any]) -> int:
    return min(map(int, node["ranks"]), default=2**32)


def _ranks(node: Mapping[str, Any]) -> str:
    """Those in the same state for the same cause together."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, slot in node["ranks"].items():
        groups.setdefault((slot["state"], slot["cause"]), []).append(int(rank))
    texts = []
    for (state, cause), ranks in sorted(groups.items(), key=lambda each: min(each[1])):
        why = f" ({_short(cause)})" if cause else ""
        texts.append(f"{ranges(ranks)} {state}{why}")
    return "; ".join(texts) or "-"


def _short(text: str) -> str:
    return text if len(text) <= CAUSE_CHARACTERS else f"{text[: CAUSE_CHARACTERS - 3]}..."


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines, each column as wide as its widest cell."""
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _recoveries(status: Mapping[str, Any]) -> list[str]:
    shown = status["recovered"][-SHOWN_RECOVERIES:]
    if not shown:
        return []
    lines = ["last recoveries:"]
    for one in shown:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["time_s"]))
        lines.append(f"  {at}  {one['took_s']:.1f} s  {_short(one['reason'])}")
    return lines
