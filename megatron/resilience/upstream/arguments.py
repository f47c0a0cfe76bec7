"""Megatron's arguments: parsed by Megatron, with every mistake of the user as one line."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from megatron.training import arguments as upstream_arguments
from megatron.training import get_args
from megatron.training.argument_utils import (
    gpt_config_from_args,
    pretrain_cfg_container_from_args,
)

from resihp_ext.environment import world_of
from resihp_ext.errors import UserError

_VOCABULARY_MULTIPLE = 384
"""128 for the GPU's sake, times 3: the padded vocabulary then divides by every tensor-parallel
degree that a layout may take later (1, 2, 3, 4, 6, 8, ...), and is the same number for all."""


def parse(
    argv: Sequence[str], add_flags: Callable[[Any], Any], *, world_size: int | None = None
) -> argparse.Namespace:
    """Parses and validates a command line, and sets Megatron's global state from it.

    Args:
        argv: Words of the command line without the program's name.
        add_flags: Adds our flags to Megatron's parser.
        world_size: Number of ranks to validate with, where it is not that of the environment.

    Raises:
        UserError: an unknown flag, or values that Megatron refuses.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        # argparse would print hundreds of lines of usage before the one that matters.
        parser.error = refuse  # type: ignore[method-assign]
        sys.argv[1:] = [word for word in sys.argv[1:] if not _negates_switch(parser, word)]
        _repair_help(parser)
        return add_flags(parser)

    with (
        _command_line(_with_worker(argv)),
        world_of(os.environ, world_size),
        user_errors("command line"),
    ):
        args = upstream_arguments.parse_and_validate_args(extra_args_provider=provide)
    if not _gave(argv, "--padded-vocab-size", "--make-vocab-size-divisible-by"):
        multiple = _VOCABULARY_MULTIPLE
        args.padded_vocab_size = -(-_vocabulary(args) // multiple) * multiple
    return args


def configurations(args: argparse.Namespace) -> tuple[Any, Any]:
    """Builds Megatron's model config and the container for ``pretrain``.

    Raises:
        UserError: values that Megatron refuses, a TP degree that does not divide the heads say.
    """
    with user_errors("model"):
        model = gpt_config_from_args(args)
        return model, pretrain_cfg_container_from_args(args, model)


def current_args() -> argparse.Namespace:
    """Megatron's global arguments."""
    return get_args()


@contextmanager
def user_errors(what: str) -> Iterator[None]:
    """Turns Megatron's refusals (assertions and value errors) into one line each.

    Raises:
        UserError: instead of AssertionError, ValueError, RuntimeError or TypeError.
    """
    try:
        yield
    except UserError:
        raise
    except (AssertionError, ValueError, RuntimeError, TypeError) as error:
        raise UserError(f"{what}: {reason_of(error)}") from error


def reason_of(error: BaseException) -> str:
    """What an error of upstream says, in one line; a bare assertion is quoted."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split()) or f"it demands: {frame.line}"
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})"


def _negates_switch(parser: argparse.ArgumentParser, word: str) -> bool:
    """Whether ``word`` is ``--no-X`` for a switch ``--X`` that has no ``--no-X`` of its own.

    Such a word only takes ``--X`` out of a preset, which has happened by now.
    """
    known = {option: action for action in parser._actions for option in action.option_strings}
    if word in known or not word.startswith("--no-"):
        return False
    switch = known.get(f"--{word.removeprefix('--no-')}")
    return switch is not None and switch.nargs == 0


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Escapes help texts that argparse cannot format: a bare "%" of upstream breaks --help."""
    for action in parser._actions:
        try:
            (action.help or "") % {**vars(action), "prog": parser.prog}
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def refuse(message: str) -> NoReturn:
    """Stands for ``ArgumentParser.error``: one line instead of pages of usage."""
    raise UserError(f"{' '.join(message.split())}; see --help")


def _with_worker(argv: Sequence[str]) -> list[str]:
    """Adds the flag without which upstream switches ``--async-save`` off, with a mere warning."""
    return [*argv, *(["--use-persistent-ckpt-worker"] if _gave(argv, "--async-save") else [])]


def _gave(argv: Sequence[str], *flags: str) -> bool:
    return any(word.split("=")[0] in flags for word in argv)


def _vocabulary(args: argparse.Namespace) -> int:
    from megatron.training import get_tokenizer

    return int(get_tokenizer().vocab_size)


@contextmanager
def _command_line(argv: Sequence[str]) -> Iterator[None]:
    """Megatron reads ``sys.argv`` and takes no other list."""
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        yield
    finally:
        sys.argv = before
