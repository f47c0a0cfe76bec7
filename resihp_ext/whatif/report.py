"""An answer for people: both layouts, figures side by side, the reason, what was not chosen.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from resihp_ext.plan.plan import Plan
from resihp_ext.whatif.answer import Answer, State
from resihp_ext.whatif.layout import layout, ranges, standby
from resihp_ext.whatif.picture import STYLES, pictures

WIDTH = 100
"""Where there is no terminal."""


def console() -> Console:
    """Writes to standard output; plain text where that is no terminal."""
    found = Console(highlight=False, emoji=False, markup=False)
    if not found.is_terminal:
        found.width = WIDTH
    return found


def text(answer: Answer, out: Console) -> str:
    """An answer as a console would show it, without blanks at the ends of lines."""
    with out.capture() as captured:
        _show(answer, out)
    return "".join(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def _show(answer: Answer, out: Console) -> None:
    scene, before = answer.scene, answer.before.plan
    p_of = scene.faulty.p_of
    grid, shape = scene.grid, scene.healthy.shape
    _line(
        out,
        f"{shape.name}: {shape.num_layers} layers, {shape.parameters / 1e9:.3g} billion parameters,"
        f" {shape.tokens} tokens a micro-batch",
    )
    _line(
        out,
        f"{grid.nodes} x {grid.devices_per_node} devices ({scene.hardware}), "
        f"{size(scene.faulty.cluster.memory_bytes)} each; "
        f"{before.micro_batches} micro-batches a step",
    )
    _layout(out, f"before: TP {grid.tp}, PP {grid.pp}, DP {grid.dp}", before, before, p_of)
    if answer.stays and answer.decision.plan.routes == before.routes:
        _line(out, "\nafter: the same layout", style="bold")
    else:
        _layout(out, "after (* changed)", answer.decision.plan, before, p_of)
    out.print()
    out.print(_figures(answer))
    out.print()
    _facts(answer, out)
    _others(answer, out)


def _line(out: Console, text: str, style: str = "") -> None:
    # Sentences are not broken: what reads them knows the width better.
    out.print(Text(text, style), soft_wrap=True)


def _layout(out: Console, title: str, plan: Plan, before: Plan, p_of: Mapping[int, float]) -> None:
    _line(out, f"\n{title}", style="bold")
    for number, table in enumerate(pictures(layout(plan, p_of, before), out.width)):
        if number:
            out.print()
        out.print(table)
    idle = standby(plan, p_of)
    dead = [rank for rank, p in sorted(p_of.items()) if p <= 0]
    if idle or dead:
        out.print()
    if idle:
        _line(out, f"standby: {ranges(idle)}")
    if dead:
        _line(out, f"dead: {ranges(dead)}", style=STYLES["dead"])


def _figures(answer: Answer) -> Table:
    states = (answer.before, answer.nothing, answer.after)
    there = answer.scene.faulty.cluster.memory_bytes
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for name in ("", "before", "nothing done", "after"):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("time of a step", *(seconds(state.iteration_s) for state in states))
    ratios = (answer.throughput_ratio(state) for state in states)
    table.add_row("throughput", *(f"{ratio:.1%}" for ratio in ratios))
    table.add_row("tokens a second", *(f"{answer.tokens_per_s(state):,.0f}" for state in states))
    table.add_row(f"fullest rank, of {size(there)}", *(_memory(state, there) for state in states))
    return table


def _memory(state: State, there: int) -> Text:
    most = state.most_bytes
    return Text(size(most)) if most <= there else Text(f"{size(most)}: too much", STYLES["dead"])


def _facts(answer: Answer, out: Console) -> None:
    decision, dead = answer.decision, answer.nothing.dead
    if dead:
        verb = "is" if len(dead) == 1 else "are"
        _line(out, f"nothing done  no step ends: {ranges(dead)} {verb} dead and part of the layout")
    moved = size(decision.moved_bytes)
    _line(out, f"transition    {seconds(decision.transition_s)}, {moved} moved")
    _line(out, f"planning      {seconds(answer.planning_s)}, {answer.scene.planner}")
    _line(out, f"reason        {decision.reason}")


def _others(answer: Answer, out: Console) -> None:
    decision = answer.decision
    if not decision.runners_up and not decision.refused:
        return
    out.print()
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for name in ("not chosen", "a step", "transition", "moved", "why"):
        right = name not in ("not chosen", "why")
        table.add_column(name, justify="right" if right else "left", no_wrap=right)
    for one in decision.runners_up:
        lost = one.candidate
        moved = size(lost.moved_bytes)
        table.add_row(
            lost.name, seconds(lost.iteration_s), seconds(lost.transition_s), moved, one.why
        )
    for name, why in decision.refused:
        table.add_row(name, "", "", "", f"impossible: {why}")
    out.print(table)


def seconds(value: float | None) -> str:
    """With a unit that fits."""
    if value is None:
        return "never ends"
    if value >= 1 or value == 0:
        return f"{value:.3f} s"
    return f"{value * 1e3:.3g} ms" if value < 0.0995 else f"{value * 1e3:.0f} ms"


def size(count: int) -> str:
    """Bytes, in powers of ten."""
    return f"{count / 1e9:.1f} GB" if count >= 1e8 or not count else f"{count / 1e6:.2f} MB"
