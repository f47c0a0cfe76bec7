"""``resihp plan``: its flags are the keys of a what-if, and where the answer goes.

Promise: neither torch nor Megatron is imported, so that the answer comes within a second.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from resihp_ext.whatif.keys import KEYS, Key


def _flag(key: Key) -> Callable[[Any], Any]:
    shown = f"  [default: {key.default}]" if key.default else ""
    if key.form:
        return click.option(
            f"--{key.name}", metavar=key.form, multiple=key.many, help=key.meaning + shown
        )
    return click.option(f"--{key.name}/--no-{key.name}", default=None, help=key.meaning + shown)


def all_keys(keys: Sequence[Key]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a command a flag for every key."""

    def given(command: Callable[..., Any]) -> Callable[..., Any]:
        for key in reversed(keys):
            command = _flag(key)(command)
        return command

    return given


def flags_of(keys: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """What was typed, by the names of the keys."""
    return {
        name.replace("_", "-"): _texts(value)
        for name, value in keys.items()
        if value is not None and value != ()
    }


def _texts(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (str(value).lower(),)
    return value if isinstance(value, tuple) else (value,)


@click.command()
@all_keys(KEYS)
@click.option(
    "--file", type=click.Path(path_type=Path), help="YAML file of the flags above; flags win."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="File for the plan, as a schedule takes it."
)
@click.option(
    "--trace", type=click.Path(path_type=Path), help="File for a step's trace, for Perfetto."
)
def plan(
    file: Path | None, as_json: bool, out: Path | None, trace: Path | None, **keys: Any
) -> int:
    """Show what a layout becomes when devices die or slow down.

    \b
    resihp plan --nodes 4 --tp 4 --pp 4 --dp 2 --model llama2-13b --dead 3 --slow 7:0.5

    No job and no device is needed. The exit code is 3 when no layout is possible.
    """
    # Only when asked for: planners and tables take a while to import.
    from resihp_ext.scheduler.infeasible import InfeasibleError
    from resihp_ext.whatif.run import EXIT_INFEASIBLE, Outputs, ask, tell

    try:
        found = ask(flags_of(keys), file)
    except InfeasibleError as error:
        click.echo(f"error: {error}", err=True)
        return EXIT_INFEASIBLE
    tell(found, Outputs(as_json=as_json, plan=out, trace=trace))
    return 0
