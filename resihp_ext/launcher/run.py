"""``resihp-run``: torchrun's flags, but one clear line and an honest exit code at the end.

Ranks are started by torch's elastic agent. What differs from torchrun is what the user sees: a
usage error that a worker has reported ends the job with exit code 2 and nothing more to read; any
other death gives one line with rank, pid and cause; a signal to the launcher ends everything.
``LOGLEVEL`` set in the environment brings the agent's own log back, as with torchrun.

torch is imported only when ranks are started, not when this module is.
"""

import contextlib
import importlib
import importlib.machinery
import io
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from resihp_ext.brake.cpu_group import remove_groups
from resihp_ext.environment import HIGHEST_PORT
from resihp_ext.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, ResiHPError, UserError
from resihp_ext.launcher.hosting import given_token
from resihp_ext.launcher.invitation import invitation, program_words
from resihp_ext.launcher.leave import leave
from resihp_ext.launcher.limits import Limits
from resihp_ext.launcher.orphans import adopt_orphans, end_children
from resihp_ext.launcher.outcome import WorkerFailure, outcome_of, shell_exit_code
from resihp_ext.launcher.slurm import take_slurm_defaults

GRACE_S = 5.0
"""Between SIGTERM and SIGKILL for what the agent's own shutdown left over."""

DEFAULT_STATIC_PORT = 29500
"""torchrun's own default for ``--master-port`` with several nodes."""

TOKEN_HELP = (
    "File with 64 hexadecimal digits, the same on all nodes: the secret of the job's control "
    "messages. Default: made by the first node and handed to the others through the rendezvous."
)

LIMITS_HELP = (
    "Limits of the control plane, as key=value,...: after how many seconds (keys ending in _s) a "
    "silent or hung worker or a lost node is given up, and the like."
)

METRICS_PORT_HELP = (
    "Serves metrics for Prometheus over HTTP at this port: this node's, and the job's where the "
    "coordinator is. 0: no metrics."
)

METRICS_HOST_HELP = (
    "The interface at which metrics are served. Nobody has to prove who they are: whoever reaches "
    "it can read them."
)

RESTARTS = 3
"""Of resilient workers before the first step, when --max-restarts is not given."""

HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(argv: Sequence[str] | None = None, *, planner: Any = None) -> int:
    """Run the job; return the exit code.

    That is 0; 2 for usage; 3 and 75 when the job gives up or is to be requeued; else the
    culprit's, or 128 + signal. ``planner`` replaces the one that finds layouts.
    """
    try:
        return _run(sys.argv[1:] if argv is None else argv, planner, program_words(argv))
    except UserError as error:
        return _say(str(error), EXIT_USAGE)
    except KeyboardInterrupt:  # before the agent has taken over the signals
        return _say("stopped by SIGINT", shell_exit_code(-signal.SIGINT))


def _run(argv: Sequence[str], planner: Any, program: Sequence[str]) -> int:
    # Imported through importlib because torch leaves these functions untyped.
    torchrun: Any = importlib.import_module("torch.distributed.run")
    # torchrun sets the same value, but with a banner of six lines.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if "LOGLEVEL" not in os.environ:
        logging.disable(logging.ERROR)
    parser = _parser(torchrun)
    args = _parse(parser, argv)
    # torchrun's parser cannot tell a default from a 0 that was typed.
    restarts, args.max_restarts = args.max_restarts, args.max_restarts or 0
    limits = Limits.read(args.control_conf, restarts=RESTARTS if restarts is None else restarts)
    _require_script(args)
    take_slurm_defaults(args, os.environ)
    _choose_rendezvous(torchrun, args)
    invited = invitation(parser, args, os.environ, program)
    with _metrics(args) as metrics, _log_dir(args) as log_hint:
        try:
            config, command, command_args = torchrun.config_from_args(args)
        except (ValueError, AssertionError, RuntimeError, OSError) as error:
            raise UserError(f"resihp-run: {_first_line(error)}; see resihp-run --help") from None
        control_planner: Any = importlib.import_module("resihp_ext.control.planner")
        extras = {
            "token": given_token(args.control_token_file, dict(os.environ)),
            "limits": limits,
            "planner": planner or control_planner.PlannerProcess(),
            "script_args": args.training_script_args,
            "invitation": invited,
            "metrics": metrics,
        }
        return _launch(config, command, command_args, log_hint, extras)


def _launch(
    config: Any, command: Any, command_args: list[str], log_hint: str, extras: dict[str, Any]
) -> int:
    api: Any = importlib.import_module("torch.distributed.launcher.api")
    ours: Any = importlib.import_module("resihp_ext.launcher.launch")
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.api")
    dist: Any = importlib.import_module("torch.distributed")
    adopts = adopt_orphans()
    remove_groups(os.getpid())  # what a launcher that was killed has left
    succeeded = False
    try:
        ours.launch(config, command, command_args, ours.Extras(adopts=adopts, **extras))
        succeeded = True
    except api.ChildFailedError as error:
        outcome = outcome_of(_failures(error), log_hint=log_hint)
        return outcome.exit_code if outcome.line is None else _say(outcome.line, outcome.exit_code)
    except ours.JobEndedError as end:
        return _say(str(end), end.exit_code) if end.exit_code != EXIT_USAGE else EXIT_USAGE
    except api.SignalException as stop:
        return _say(f"stopped by {stop.sigval.name}", shell_exit_code(-stop.sigval))
    except ResiHPError as error:
        return _say(_first_line(error), EXIT_FAILURE)
    except (rendezvous.RendezvousError, dist.DistError) as error:
        return _say(
            f"rendezvous at {config.rdzv_endpoint!r} failed: {_first_line(error)}", EXIT_FAILURE
        )
    finally:
        # After success nothing is left; a helper that outlives its worker on purpose may stay.
        if not succeeded:
            for signum in HANDLED_SIGNALS:  # a second Ctrl-C must not interrupt the sweep
                signal.signal(signum, signal.SIG_IGN)
            end_children(grace_s=GRACE_S)
        remove_groups(os.getpid())
    return EXIT_OK


def _failures(error: Any) -> list[WorkerFailure]:
    return [
        WorkerFailure(rank=rank, pid=each.pid, exit_code=each.exitcode, time_s=each.timestamp)
        for rank, each in error.failures.items()
    ]


def _parser(torchrun: Any) -> Any:
    parser = torchrun.get_args_parser()
    parser.prog = "resihp-run"
    if parser.get_default("max_restarts") == 0:  # not from PET_MAX_RESTARTS
        parser.set_defaults(max_restarts=None)
    parser.add_argument("--control-token-file", "--control_token_file", help=TOKEN_HELP)
    parser.add_argument("--control-conf", "--control_conf", help=LIMITS_HELP)
    parser.add_argument(
        "--metrics-port", "--metrics_port", type=int, default=0, help=METRICS_PORT_HELP
    )
    parser.add_argument(
        "--metrics-host", "--metrics_host", default="127.0.0.1", help=METRICS_HOST_HELP
    )
    return parser


def _parse(parser: Any, argv: Sequence[str]) -> Any:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(list(argv))
    except SystemExit as stop:
        if not stop.code:  # --help
            raise
        # argparse prints its usage, forty lines of it, and then the reason: keep the reason.
        reason = said.getvalue().strip().splitlines()[-1].partition("error: ")[2]
        raise UserError(f"resihp-run: {reason}; see resihp-run --help") from None


def _require_script(args: Any) -> None:
    script: str = args.training_script
    if args.module:
        # Workers run ``python -m`` in this folder; the top package alone is looked up because
        # finding a submodule would import it.
        package = script.partition(".")[0]
        places = [str(Path.cwd()), *sys.path]
        found = importlib.machinery.PathFinder.find_spec(package, places) is not None
        kind = "module"
    elif args.no_python:
        found, kind = shutil.which(script) is not None, "program"
    else:
        found, kind = Path(script).exists(), "script"
    if not found:
        raise UserError(f"resihp-run: {kind} {script!r} does not exist; check the name or path")


def _choose_rendezvous(torchrun: Any, args: Any) -> None:
    """On one node pick a free port instead of a fixed one, so that two jobs never collide."""
    try:
        _, most_nodes = torchrun.parse_min_max_nnodes(args.nnodes)
    except (ValueError, RuntimeError):
        raise UserError(
            f"resihp-run: --nnodes {args.nnodes!r} is neither a number nor MIN:MAX"
        ) from None
    nothing_said = args.rdzv_backend == "static" and not args.rdzv_endpoint
    if args.standalone or (nothing_said and args.master_port is None and most_nodes == 1):
        args.rdzv_backend = "c10d"
        args.rdzv_endpoint = "localhost:0"
        args.rdzv_id = str(uuid.uuid4())
    if args.master_port is None:
        args.master_port = DEFAULT_STATIC_PORT


@contextlib.contextmanager
def _metrics(args: Any) -> Iterator[Any]:
    """The endpoint for metrics, if there is to be one.

    Raises:
        UserError: it cannot listen where it should.
    """
    if not args.metrics_port:
        yield None
        return
    if not 0 < args.metrics_port <= HIGHEST_PORT:
        raise UserError(
            f"resihp-run: --metrics-port {args.metrics_port}: give a port from 1 to "
            f"{HIGHEST_PORT}, or 0 for none"
        )
    endpoint: Any = importlib.import_module("resihp_ext.telemetry.endpoint")
    served = endpoint.Endpoint(args.metrics_host, args.metrics_port)
    try:
        yield served
    finally:
        served.close()


@contextlib.contextmanager
def _log_dir(args: Any) -> Iterator[str]:
    """Give the agent its folder; yield the hint where a worker's output is.

    Without redirection the folder holds nothing for people, and the agent would leave one behind
    in the temporary directory for every job.
    """
    if args.log_dir is not None:
        yield f"logs are under {args.log_dir}"
    elif args.redirects != "0" or args.tee != "0":
        args.log_dir = tempfile.mkdtemp(prefix="resihp-run-")
        yield f"logs are under {args.log_dir}"
    else:
        with tempfile.TemporaryDirectory(prefix="resihp-run-", ignore_cleanup_errors=True) as own:
            args.log_dir = own
            yield "its output is above (--log-dir DIR --tee 3 keeps one file per rank)"


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _say(line: str, exit_code: int) -> int:
    print(f"error: {line}", file=sys.stderr, flush=True)  # noqa: T201 - the one line for people
    return exit_code


def entry() -> NoReturn:
    """The command."""
    try:
        code = main()
    except SystemExit as end:  # --help and the like
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    leave(code)


if __name__ == "__main__":
    entry()
