"""``resihp report``: a run as a page.

Promise: neither torch nor Megatron is imported, and the job need not run any more.
"""

from pathlib import Path

import click


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="HTML file to write.  [default: DIR/report.html]",
)
def report(directory: Path, out: Path | None) -> None:
    """Write a page about a run: throughput, changes, layouts, decisions.

    DIR is the --resilience-dir of a job, which may run or be over, or what resihp simulate has
    written. The page is one file and needs nothing else.
    """
    from resihp_ext.report.write import write_report  # only when asked for

    click.echo(write_report(directory, out))
