"""``resihp receipts``: what has happened to a job.

Promise: neither torch nor Megatron is imported, and the job need not run any more.
"""

from pathlib import Path

import click


@click.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list.")
def receipts(directory: Path, as_json: bool) -> None:
    """Show every change of a job's layout: why, how long, and the plans around it.

    DIR is the job's --resilience-dir; the job may run, or be over. A star marks ranks that hold
    something else than before.
    """
    from resihp_ext.commands.receipts import show  # only when asked for

    click.echo(show(directory, as_json=as_json))
