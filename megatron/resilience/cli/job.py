"""Verbs that talk to a running job: ``resihp status``, ``top``, ``drain`` and ``join``.

Promise: neither torch nor Megatron is imported, and what goes wrong is one line.
"""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click

DIRECTORY = click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
WAIT = click.option(
    "--wait",
    "wait_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.0),
    help="Wait until it is done, for so long at most, and say how it goes.",
)


def _one_line(command: Callable[..., int | None]) -> Callable[..., int]:
    """Errors of ours become a line and their exit code."""

    @wraps(command)
    def verb(**arguments: Any) -> int:
        from resihp_ext.commands.picture import printable
        from resihp_ext.errors import ResiHPError

        try:
            return command(**arguments) or 0
        except ResiHPError as error:
            click.echo(f"error: {printable(str(error))}", err=True)
            return error.exit_code

    return verb


@click.command()
@DIRECTORY
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_one_line
def status(directory: Path, as_json: bool) -> int:
    """Show what a running job does, its nodes and its recoveries.

    DIR is the job's --resilience-dir. The exit code is 0 while the job runs, 3 when it is over, 1
    when nobody answers, 2 when DIR or the token in it is none of a job.
    """
    from resihp_ext.commands.show import show

    text, exit_code = show(directory, as_json=as_json)
    click.echo(text)
    return exit_code


@click.command()
@DIRECTORY
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@_one_line
def top(directory: Path, once: bool) -> int:
    """Watch a running job: ranks, stages, speeds, plan, latest events and receipts.

    DIR is the job's --resilience-dir. Drawn anew every second; q or Ctrl-C leaves. The exit code is
    0 when it was left so, 3 when the job is over, 1 when nobody answers, 2 when DIR or the token in
    it is none of a job, or there is no terminal.
    """
    from resihp_ext.commands import top as command

    return command.once(directory) if once else command.top(directory)


@click.command()
@DIRECTORY
@click.argument("node", metavar="NODE")
@WAIT
@_one_line
def drain(directory: Path, node: str, wait_s: float | None) -> None:
    """Take a node out of a running job between two steps.

    The exit code is 4 when the others cannot do without it, 5 when it is not away after --wait.
    """
    from resihp_ext.commands.drain import drain as carry_out
    from resihp_ext.commands.job import RunningJob
    from resihp_ext.commands.waiting import Patience

    patience = None if wait_s is None else Patience(wait_s)
    carry_out(RunningJob.find(directory), node, patience, click.echo)


@click.command()
@DIRECTORY
@click.argument("node", metavar="[NODE]", default="")
@WAIT
@_one_line
def join(directory: Path, node: str, wait_s: float | None) -> None:
    """Let a drained or quarantined node take part again.

    Without NODE print the command that a new node has to run to join the job.
    """
    from resihp_ext.commands.job import RunningJob
    from resihp_ext.commands.join import join as carry_out
    from resihp_ext.commands.waiting import Patience

    patience = None if wait_s is None else Patience(wait_s)
    job = RunningJob.find(directory)
    carry_out(job, node, patience, click.echo, lambda line: click.echo(line, err=True))
