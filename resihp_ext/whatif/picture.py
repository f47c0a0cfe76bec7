"""Draws a layout: a row a replica, a column a stage.

What does not fit beside each other goes below. In large layouts neighbours that are alike share a
row or a column: of 256 devices those that differ are what one wants to see. Imports neither torch
nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby

from rich.table import Table
from rich.text import Text

from resihp_ext.whatif.layout import Cell, Layout, ranges

CELLS = 24
"""A layout with more of them is drawn with alike neighbours together."""
GAP = 2
STYLES = {"dead": "bold red", "slow": "yellow", "changed": "bold cyan"}

Numbers = list[int]


def pictures(layout: Layout, width: int) -> Iterator[Table]:
    """Tables that fit into ``width`` columns, some stages each."""
    rows, stages = _rows(layout), _columns(layout)
    labels = [_label("replica", numbers) for numbers in rows]
    columns = [
        (_label("stage", places), [_text(layout, numbers, places) for numbers in rows])
        for places in stages
    ]
    first = max(map(len, labels)) + GAP
    begin = 0
    while begin < len(columns):
        end, used = begin + 1, first + _width(columns[begin])
        while end < len(columns) and used + _width(columns[end]) - GAP <= width:
            used += _width(columns[end])
            end += 1
        yield _table(labels, columns[begin:end])
        begin = end


Column = tuple[str, list[Text]]


def _table(labels: Sequence[str], columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, no_wrap=True)
    for row, label in enumerate(labels):
        if row:
            table.add_row()
        table.add_row(label, *(cells[row] for _, cells in columns))
    return table


def _width(column: Column) -> int:
    name, cells = column
    return GAP + max(len(line) for one in (name, *map(str, cells)) for line in one.splitlines())


def _rows(layout: Layout) -> list[Numbers]:
    """Replicas that share a row."""
    return _together(layout, len(layout), lambda n: tuple(map(_look, layout[n])))


def _columns(layout: Layout) -> list[Numbers]:
    """Stages that share a column."""
    longest = max(map(len, layout))
    return _together(
        layout,
        longest,
        lambda s: tuple(_look(one[s])[1:] if s < len(one) else None for one in layout),
    )


def _together(layout: Layout, count: int, look: Callable[[int], Hashable]) -> list[Numbers]:
    if sum(map(len, layout)) <= CELLS:
        return [[number] for number in range(count)]
    return [list(group) for _, group in groupby(range(count), look)]


def _look(cell: Cell) -> tuple[Hashable, ...]:
    """What must be equal for two cells to be alike; of neighbouring stages all but the first."""
    # Damage names ranks, so that only cells without it are alike.
    return cell.layers[0], cell.depth, cell.tp, cell.micro_batches, cell.damage, cell.changed


def _label(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"


def _text(layout: Layout, numbers: Numbers, places: Numbers) -> Text:
    """One cell for all replicas of a row and stages of a column."""
    one = layout[numbers[0]]
    if places[0] >= len(one):
        return Text()
    cell = one[places[0]]
    style = STYLES["changed"] if cell.changed else ""
    names = [_ranks(layout, numbers, place) for place in (places[0], places[-1])]
    ranks = " to ".join(dict.fromkeys(names))
    each = " each" if len(numbers) > 1 else ""
    lines = [
        Text(f"{ranks}{' *' * cell.changed}", style),
        Text(f"TP {cell.tp}, {cell.depth} layer{'s' * (cell.depth != 1)}", style),
        Text(f"{cell.micro_batches} micro-batches{each}", "dim"),
    ]
    for rank, p in cell.damage:
        dead = Text(f"{rank} dead", STYLES["dead"])
        lines.append(Text(f"{rank} at {p:g}", STYLES["slow"]) if p > 0 else dead)
    return Text("\n").join(lines)


def _ranks(layout: Layout, numbers: Numbers, place: int) -> str:
    ranks = [rank for number in numbers for rank in layout[number][place].ranks]
    # Of one group their order matters: it is that of tp_rank.
    return ranges(sorted(ranks) if len(numbers) > 1 else ranks)
