"""A layout as a table: a row a replica, a column a stage; alike replicas share a row."""

from __future__ import annotations

from html import escape

from resihp_ext.plan.plan import Plan
from resihp_ext.whatif.layout import Cell, layout, ranges, standby

MOST_ROWS = 16


def cells(plan: Plan, before: Plan | None) -> str:
    """The HTML; a star marks ranks that hold something else than before."""
    p_of = {device.rank: device.p for device in plan.devices}
    rows: list[tuple[list[int], tuple[Cell, ...]]] = []
    for number, row in enumerate(layout(plan, p_of, before or plan)):
        same = next(
            (one for one in rows if list(map(_shape, one[1])) == list(map(_shape, row))), None
        )
        if same is not None and len(plan.replicas) > MOST_ROWS:
            same[0].append(number)
        else:
            rows.append(([number], row))
    longest = max((len(row) for _, row in rows), default=0)
    head = "".join(f"<th>stage {at}</th>" for at in range(longest))
    body = "".join(_row(numbers, row) for numbers, row in rows[:MOST_ROWS])
    foot = []
    if len(rows) > MOST_ROWS:
        foot.append(f"and {len(rows) - MOST_ROWS} more rows")
    idle, dead = standby(plan, p_of), [rank for rank, p in sorted(p_of.items()) if p <= 0]
    if idle:
        foot.append(f"standby: {ranges(idle)}")
    if dead:
        foot.append(f"dead: {ranges(dead)}")
    return (
        f'<div class="wide"><table class="layout"><thead><tr><th></th>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p class="soft">{escape("; ".join(foot))}</p>'
    )


def _shape(cell: Cell) -> tuple[object, ...]:
    return cell.layers, cell.tp, cell.micro_batches, cell.p, cell.changed


def _row(numbers: list[int], row: tuple[Cell, ...]) -> str:
    name = f"replica {numbers[0]}" if len(numbers) == 1 else f"{len(numbers)} replicas"
    return f"<tr><th>{name}</th>{''.join(map(_cell, row))}</tr>"


def _cell(cell: Cell) -> str:
    kind = "healthy" if cell.p >= 1 else "dead" if cell.p <= 0 else "slow"
    star = " *" if cell.changed else ""
    speed = "" if cell.p >= 1 else f"<br>{cell.p:.2f} of full speed"
    words = (
        f"ranks {ranges(cell.ranks)}{star}<br>TP {cell.tp}, layers {cell.layers[0]} to "
        f"{cell.layers[1] - 1}<br>{cell.micro_batches} micro-batches{speed}"
    )
    return f'<td class="{kind}">{words}</td>'
