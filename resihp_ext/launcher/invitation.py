"""The command by which another node joins a job: that of the first node, without what is its own.

``resihp join`` shows it. Where a flag came from (typed, environment, Slurm) makes no difference:
all are written out, because a node that comes later may lack the environment.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from resihp_ext.control.ask import Invitation
from resihp_ext.launcher.hosting import TOKEN

MODULE = "resihp_ext.launcher.run"
OF_ONE_NODE = {
    "help",
    "print_completion",
    "standalone",
    "node_rank",
    "local_addr",
    "master_addr",
    "master_port",
    "metrics_host",
    # Counted by the coordinator for all nodes.
    "max_restarts",
    # Parts of the command that come last.
    "training_script",
    "training_script_args",
}
NEEDED = {"nnodes", "nproc_per_node", "rdzv_backend", "rdzv_endpoint", "rdzv_id"}
"""Written even where they are defaults."""


def invitation(
    parser: Any, args: Any, environ: Mapping[str, str], program: Sequence[str]
) -> Invitation:
    """What another node has to run.

    Args:
        parser: Of ``resihp-run``.
        args: What it has found, with the rendezvous that was chosen.
        environ: Of this launcher.
        program: How it was started, see :func:`program_words`.
    """
    obstacle = _obstacle(args)
    if obstacle:
        return Invitation(obstacle=obstacle)
    words = (*program, *_flags(parser, args, environ))
    script = (args.training_script, *args.training_script_args)
    needs_token = bool(environ.get(TOKEN)) and args.control_token_file is None
    return Invitation(words=(*words, *script), folder=str(Path.cwd()), needs_token=needs_token)


def _obstacle(args: Any) -> str:
    if args.rdzv_backend != "c10d":
        return (
            f"its rendezvous ({args.rdzv_backend}) admits nobody later; "
            "start it with --rdzv-backend c10d"
        )
    _, _, port = args.rdzv_endpoint.rpartition(":")
    if args.nnodes.rpartition(":")[2] == "1" or port == "0":
        return (
            "it was started for one node; start it with --nnodes 1:N, --rdzv-backend c10d "
            "and --rdzv-endpoint HOST:PORT"
        )
    return ""


def _flags(parser: Any, args: Any, environ: Mapping[str, str]) -> Iterator[str]:
    for action in parser._actions:
        name = action.dest
        if name in OF_ONE_NODE:
            continue
        value = _text(name, getattr(args, name))
        # torch takes PET_NAME of the environment for the default.
        default = getattr(args, name) == action.default and f"PET_{name.upper()}" not in environ
        if not value or (default and name not in NEEDED):
            continue
        flag = next(each for each in action.option_strings if each.startswith("--"))
        if action.nargs == 0:
            yield flag
        elif value.startswith("-"):  # would be taken for a flag
            yield f"{flag}={value}"
        else:
            yield from (flag, value)


def _text(name: str, value: Any) -> str:
    if name == "rdzv_conf" and value:
        return ",".join(part for part in value.split(",") if not part.startswith("is_host="))
    if isinstance(value, list):
        return ",".join(item.replace(",", ",,") for item in value)
    return "" if value is None or value is False else str(value)


def program_words(
    argv: Sequence[str] | None,
    orig_argv: Sequence[str] = tuple(sys.orig_argv),
    own_argv: Sequence[str] = tuple(sys.argv),
) -> list[str]:
    """How this process was started, without its own flags.

    Args:
        argv: Flags that a caller has given, if they are not those of the process.
    """
    flags = list(own_argv[1:])
    begin = len(orig_argv) - len(flags)
    started = list(orig_argv[1:begin])
    if argv is not None or not started or list(orig_argv[begin:]) != flags:
        return [sys.executable, "-m", MODULE]
    if len(started) == 1 and Path(started[0]).name == "resihp-run":
        return [str(Path(started[0]).absolute())]
    return [sys.executable, *started]
