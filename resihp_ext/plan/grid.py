"""A program as a text grid: one row a rank group, one column a place in its list.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from resihp_ext.plan.action import COMPUTE
from resihp_ext.plan.program import Cell, Program

AROUND = 6
"""Cells shown on each side of a marked one; a step of a large job has hundreds."""


def grid(program: Program, marked: Collection[Cell] = ()) -> str:
    """Draws all actions; with ``marked`` cells only their surroundings, each as ``>>F3<<``."""
    columns = range(max((len(actions) for _, actions in program.lists), default=0))
    if marked:
        places = [cell.index for cell in marked]
        columns = range(max(0, min(places) - AROUND), min(len(columns), max(places) + AROUND + 1))
    rows = [["", *map(str, columns)]]
    for instance, actions in program.lists:
        row = [program.head(instance)]
        for index in columns:
            text = str(actions[index]) if index < len(actions) else ""
            row.append(f">>{text}<<" if Cell(instance=instance, index=index) in marked else text)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        " ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def compute_grid(program: Program) -> str:
    """Draws only what is computed, as pipeline schedules are usually drawn."""
    lists = tuple(
        (instance, tuple(action for action in actions if action.kind in COMPUTE))
        for instance, actions in program.lists
    )
    return grid(replace(program, lists=lists))
