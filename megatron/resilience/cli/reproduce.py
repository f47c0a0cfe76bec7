"""``resihp reproduce``: the paper's tables and figures, made anew on this machine.

Promise: neither torch nor Megatron is imported.
"""

import os
from pathlib import Path

import click


@click.command()
@click.option("--all", "everything", is_flag=True, help="Every table and figure.")
@click.option("--only", metavar="NAME,...", help="Some of them; a wrong name lists all.")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder (made)."
)
@click.option("--small", is_flag=True, help="Small configurations, short series: under a minute.")
@click.option(
    "--seeds", type=click.IntRange(1, 100), help="Draws of faults of each case.  [default: 2]"
)
@click.option("--jobs", type=click.IntRange(1, 256), help="Processes.  [default: one a core]")
@click.option(
    "--limit-s", type=click.FloatRange(1), default=3600.0, show_default=True, help="Longest time."
)
def reproduce(
    everything: bool,
    only: str | None,
    out: Path,
    small: bool,
    seeds: int | None,
    jobs: int | None,
    limit_s: float,
) -> None:
    """Make the paper's tables and figures, ours beside the paper's.

    \b
    resihp reproduce --all --out out/
    resihp reproduce --only fail-stop,ablation --out out/ --small

    Writes a CSV and pictures of each, claims.csv, and report.html. The exit code is 0 when all of
    it was made, wherever our figures lie; 1 when something failed or took too long; 2 for bad
    flags.
    """
    # Only when asked for: the simulator takes a while to import.
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from resihp_ext.errors import UserError
    from resihp_ext.reproduce.figure import Scale
    from resihp_ext.reproduce.parts import chosen
    from resihp_ext.reproduce.run import reproduce as run

    if everything == (only is not None):
        raise UserError("reproduce: say either --all or --only NAME,...")
    parts = chosen(None if everything else (only or "").split(","))
    scale = Scale(seeds=seeds or (1 if small else 2), small=small)
    cores = len(os.sched_getaffinity(0))
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("runs", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(shown, completed=done, total=total)

        figures = run(parts, scale, out, jobs=jobs or cores, limit_s=limit_s, progress=progress)
    for figure in figures:
        for claim in figure.claims:
            low, high = claim.ours
            click.echo(
                f"{claim.quantity}: {low:.2f} to {high:.2f}{claim.unit}, paper "
                f"{claim.paper[0]:g} to {claim.paper[1]:g}{claim.unit}: {claim.verdict}"
            )
    click.echo(f"wrote {out / 'report.html'}")
