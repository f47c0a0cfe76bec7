"""``resihp <verb>``: everything except starting a job, which is ``resihp-run``.

Promise: ``--help`` and ``version`` answer at once; torch and Megatron are imported only by verbs
that need them. Bad input gives one line on stderr and exit code 2.
"""

import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal

import click

from megatron.resilience.cli.job import drain, join, status, top
from megatron.resilience.cli.plan import plan
from megatron.resilience.cli.receipts import receipts
from megatron.resilience.cli.report import report as report_verb
from megatron.resilience.cli.reproduce import reproduce
from megatron.resilience.cli.simulate import simulate
from resihp_ext import __version__
from resihp_ext.errors import EXIT_FAILURE, EXIT_USAGE, UserError


@click.group(invoke_without_command=True)
@click.pass_context
def resihp(context: click.Context) -> None:
    """Megatron pretraining that survives dead and slow devices."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@resihp.command()
def version() -> None:
    """Print the versions of this project and of what it stands on."""
    below = ", ".join(f"{name} {_installed(name)}" for name in ("megatron-core", "torch"))
    click.echo(f"resihp {__version__} ({below}, Python {sys.version.split()[0]})")


@resihp.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of lines.")
def doctor(as_json: bool) -> int:
    """Check versions, origin of Megatron, device, NCCL, patches, extras and machine limits.

    The exit code is 1 when any check fails, else 0.
    """
    from megatron.resilience.doctor import gather, report  # imports torch: only when asked for

    findings = report.examine(gather.gather())
    click.echo(report.as_json(findings) if as_json else report.as_text(findings))
    return report.exit_code(findings)


@resihp.command("profile")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="JSON file to write (required)."
)
@click.option("--model", default="tiny", show_default=True, help="Known model, by name.")
@click.option("--seq-length", type=int, help="Tokens of a micro-batch.  [default: the model's]")
@click.option(
    "--tp", "tps", type=int, multiple=True, help="Degree to measure.  [default: all there are]"
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="What to measure on.",
)
@click.option("--quick", is_flag=True, help="Fewer micro-batches and repetitions, TP up to 2.")
def profile_machine(
    out: Path,
    model: str,
    seq_length: int | None,
    tps: tuple[int, ...],
    device: Literal["auto", "cpu", "cuda"],
    quick: bool,
) -> None:
    """Measure layers and messages on this machine, for the cost model.

    Runs real Megatron layers, one process a device, and fits alpha * tokens + beta * sum(l^2).
    """
    from megatron.resilience.device.choose import prepare_environment

    prepare_environment(device)
    from megatron.resilience.profile import run  # imports torch: only when asked for

    options = run.Options(
        out=out, model=model, seq_length=seq_length, tps=tps, device=device, quick=quick
    )
    run.profile(options, click.echo)


for verb in (plan, simulate, reproduce, status, top, drain, join, receipts, report_verb):
    resihp.add_command(verb)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; return its exit code (2 for bad input)."""
    try:
        result = resihp.main(args=argv, prog_name="resihp", standalone_mode=False)
    except UserError as error:
        return _say(str(error), EXIT_USAGE)
    except click.UsageError as error:
        return _say(f"{error.format_message()} See resihp --help.", EXIT_USAGE)
    except click.ClickException as error:
        return _say(error.format_message(), EXIT_FAILURE)
    except click.Abort:
        return _say("interrupted", 130)
    return result if isinstance(result, int) else 0


def _say(line: str, exit_code: int) -> int:
    click.echo(f"error: {line}", err=True)
    return exit_code


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


if __name__ == "__main__":
    sys.exit(main())
