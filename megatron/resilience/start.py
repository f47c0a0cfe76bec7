"""The first steps of a process and its last one: environment, command line, exit code.

Imports neither torch nor Megatron: what stands in the environment must stand there before they are
imported, and a wrong ``--preset`` should not cost ten seconds of imports.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Literal, cast

from megatron.resilience.device.choose import prepare_environment
from megatron.resilience.preset import read_preset, split_presets, with_defaults
from resihp_ext.control.worker_environment import WorkerEnvironment
from resihp_ext.environment import RankEnvironment
from resihp_ext.errors import EXIT_OK, ResiHPError, UserError

_DEVICES = ("auto", "cpu", "cuda")


def command_line(argv: Sequence[str]) -> list[str]:
    """Replaces presets by their flags and prepares the environment for the chosen device.

    Raises:
        UserError: an unknown preset or device.
    """
    names, explicit = split_presets(argv)
    words = explicit
    for name in reversed(names):
        words = with_defaults(read_preset(name), words)
    prepare_environment(cast(Literal["auto", "cpu", "cuda"], _device(words)))
    return words


def _device(words: Sequence[str]) -> str:
    """The last ``--device`` of a command line; the real parser comes after torch is imported."""
    device = "auto"
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if word == "--device":
            device = following
        elif word.startswith("--device="):
            device = word.removeprefix("--device=")
    if device not in _DEVICES:
        raise UserError(f"--device {device}: choose one of {', '.join(_DEVICES)}")
    return device


def run_to_exit_code(main: Callable[[Sequence[str]], None], argv: Sequence[str]) -> int:
    """Runs ``main``; an error of ours becomes one line on stderr.

    Returns:
        0, or that of the error: 2 after a :class:`UserError`, mostly 1 after another
        :class:`ResiHPError`. Errors that are not ours keep their traceback.
    """
    try:
        main(argv)
    except ResiHPError as error:
        if _speaks_for_others() if error.speaks is None else error.speaks:
            sys.stdout.flush()
            # One write, so that lines of several ranks do not run into each other.
            sys.stderr.write(f"error: {error}\n")
            sys.stderr.flush()
        return error.exit_code
    return EXIT_OK


def _speaks_for_others() -> bool:
    """Ranks that start together meet the same error; one that joins later is alone with its own."""
    try:
        worker = WorkerEnvironment.from_environ(os.environ)
        if worker is not None and worker.joins:
            return True
        return RankEnvironment.from_environ(os.environ).local_rank == 0
    except UserError:
        return True
