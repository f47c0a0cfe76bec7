"""``resihp reproduce``: the paper's tables and figures, made anew on this machine.

Promise: neither torch nor Megatron is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from resihp_ext.reproduce.figure import Claim, Figure, Part, Scale

REAL_LIMIT_S = 1000.0
"""Of the real jobs."""


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
    "--losses",
    type=click.Path(path_type=Path, dir_okay=False),
    help="CSV of scripts/paper/loss_curves.py, for the loss curves.",
)
@click.option("--real", is_flag=True, help="Run that script: two real CPU jobs, some minutes.")
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
    losses: Path | None,
    real: bool,
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
    from resihp_ext.errors import UserError
    from resihp_ext.reproduce.figure import Scale
    from resihp_ext.reproduce.losses import read
    from resihp_ext.reproduce.parts import chosen

    if everything == (only is not None):
        raise UserError("reproduce: say either --all or --only NAME,...")
    if real and losses is not None:
        raise UserError("reproduce: --real makes the curves that --losses reads: say one of them")
    if losses is not None:
        read(losses)
    parts = chosen(None if everything else (only or "").split(","))
    if real:
        losses = _real(out)
    scale = Scale(seeds=seeds or (1 if small else 2), small=small, losses=losses)
    figures = _made(parts, scale, out, jobs or len(os.sched_getaffinity(0)), limit_s)
    for figure in figures:
        for claim in figure.claims:
            click.echo(claim_line(claim))
    click.echo(f"wrote {out / 'report.html'}")


def claim_line(claim: Claim) -> str:
    """One figure beside the paper's."""
    from resihp_ext.reproduce.page import paper_span, span

    ours = span(*claim.ours, claim.unit)
    return f"{claim.quantity}: {ours}; paper {paper_span(claim)}: {claim.verdict}"


def _made(
    parts: Sequence[Part], scale: Scale, out: Path, jobs: int, limit_s: float
) -> tuple[Figure, ...]:
    """With a progress bar."""
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from resihp_ext.errors import ResiHPError, UserError
    from resihp_ext.reproduce.run import reproduce as run

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        shown = bar.add_task("runs", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(shown, completed=done, total=total)

        try:
            return run(parts, scale, out, jobs=jobs, limit_s=limit_s, progress=progress)
        except UserError:
            raise
        except ResiHPError as error:
            raise click.ClickException(str(error)) from error


def _real(out: Path) -> Path:
    """Runs the script of the loss curves; returns its file."""
    from resihp_ext.errors import UserError

    script = Path(__file__).resolve().parents[3] / "scripts" / "paper" / "loss_curves.py"
    if not script.exists():
        raise UserError(f"reproduce --real: {script} is not there; run from a checkout")
    made = out / "loss_curves.csv"
    command = [sys.executable, str(script), "--out", str(made)]
    try:
        ended = subprocess.run(command, stdout=sys.stderr, timeout=REAL_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise click.ClickException(
            f"reproduce --real: not done within {REAL_LIMIT_S:.0f} s"
        ) from None
    if ended.returncode:
        raise click.ClickException("reproduce --real: the jobs failed, see above")
    return made
