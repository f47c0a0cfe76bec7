"""``resihp simulate``: what hours of faults will make of each policy.

Promise: neither torch nor Megatron is imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from megatron.resilience.cli.plan import all_keys, flags_of
from resihp_ext.foresight.keys import KEYS, NAMES

if TYPE_CHECKING:
    from resihp_ext.foresight.question import Question
    from resihp_ext.foresight.runs import Outcome


@click.command()
@all_keys(KEYS)
@click.option(
    "--file", type=click.Path(path_type=Path), help="YAML file of the flags above; flags win."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder: the first run of each policy for resihp report, and pictures.",
)
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes.  [default: one a core]")
@click.option(
    "--limit-s", type=click.FloatRange(1), default=3600.0, show_default=True, help="Longest time."
)
def simulate(
    file: Path | None,
    as_json: bool,
    out: Path | None,
    jobs: int | None,
    limit_s: float,
    **keys: Any,
) -> None:
    """Show what hours of faults make of a job under each policy.

    \b
    resihp simulate --nodes 33 --tp 4 --pp 16 --dp 4 --model llama2-70b --hardware a100
        --sequence-parallel --sharded-optimizer --fault-every-s 1800 --policy restart,joint

    Every policy meets the same faults, in as many runs as there are seeds. No job and no device is
    needed. The exit code is 1 when a run failed or all took too long, 2 for bad flags.
    """
    # Only when asked for: the simulator takes a while to import.
    from resihp_ext.errors import ResiHPError, UserError
    from resihp_ext.foresight.question import question
    from resihp_ext.foresight.runs import spares_needed
    from resihp_ext.foresight.say import as_json as one_line
    from resihp_ext.foresight.say import as_text
    from resihp_ext.whatif.settings import Settings, read_file

    asked = question(Settings.of(flags_of(keys), read_file(file, NAMES) if file else {}))
    cores = jobs or len(os.sched_getaffinity(0))
    try:
        outcomes = _with_bar(asked, cores, limit_s)
        spares = None
        if asked.goal is not None:
            spares = spares_needed(asked, jobs=cores, limit_s=limit_s)
    except UserError:
        raise
    except ResiHPError as error:
        raise click.ClickException(str(error)) from error
    if out is not None:
        _write(asked, outcomes, out)
    if as_json:
        click.echo(one_line(asked, outcomes, spares))
    else:
        click.echo(as_text(asked, outcomes, spares), nl=False)


def _with_bar(asked: Question, jobs: int, limit_s: float) -> dict[str, list[Outcome]]:
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from resihp_ext.foresight.runs import run_all, runs_of

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    screen = Console(stderr=True)
    with Progress(*columns, console=screen, disable=not screen.is_terminal) as bar:
        shown = bar.add_task("runs", total=len(runs_of(asked)))
        told: Callable[[int], None] = lambda done: bar.update(shown, completed=done)  # noqa: E731
        return run_all(asked, jobs=jobs, limit_s=limit_s, done=told)


def _write(asked: Question, outcomes: dict[str, list[Outcome]], out: Path) -> None:
    from statistics import fmean

    from resihp_ext.foresight.files import write_run
    from resihp_ext.foresight.runs import interval, ordered, record
    from resihp_ext.foresight.say import lost_hours
    from resihp_ext.report.page import FILE_STYLE
    from resihp_ext.report.strips import Interval, Stack, intervals, stacks
    from resihp_ext.report.svg import alone
    from resihp_ext.report.write import write_whole

    for policy in asked.policies:
        write_run(record(asked, policy, asked.seeds[0]), out / policy)
    rows = []
    for name in ordered(outcomes):
        values = tuple(one.goodput_ratio for one in outcomes[name])
        low, high = interval(values)
        rows.append(Interval(label=name, mean=fmean(values), low=low, high=high))
    goodput = intervals("Goodput", "goodput, part of a job without faults", rows)
    write_whole(out / "goodput.svg", alone(goodput, FILE_STYLE))
    lost = {name: lost_hours(outcomes[name]) for name in ordered(outcomes)}
    kinds = sorted({kind for hours in lost.values() for kind in hours})
    bars = [
        Stack(label=name, parts=[hours.get(kind, 0.0) for kind in kinds])
        for name, hours in lost.items()
    ]
    picture = stacks("Lost", "device-hours lost, in the mean of all runs", kinds, bars)
    write_whole(out / "lost_hours.svg", alone(picture, FILE_STYLE))
