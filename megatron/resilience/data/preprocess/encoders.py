"""Text to token ids: bytes by default, or any tokenizer that upstream's ``build_tokenizer`` knows.

Promise: an :class:`Encoder` is ready to use in a forked worker; the byte encoder imports no torch.
"""

import argparse
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import numpy as np

from megatron.resilience.data.byte_tokenizer import (
    BYTE_EOD,
    BYTE_TRAINING_FLAGS,
    BYTE_VOCAB_SIZE,
    byte_ids,
)
from resihp_ext.errors import UserError

BYTES = "bytes"
"""The ``--tokenizer-type`` of the byte encoder."""

# What the many libraries behind build_tokenizer raise for a wrong file, flag or missing package.
_BUILD_ERRORS = (
    ImportError, OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError,
    AssertionError, NotImplementedError,
)  # fmt: skip


class Encoder(Protocol):
    """What a worker needs of a tokenizer, and what the run reports about it."""

    name: str
    vocab_size: int
    eod: int | None
    """The id that ends a document; None when the tokenizer has none."""
    training_flags: tuple[str, ...]
    """The flags of ``pretrain_gpt.py`` that describe the same vocabulary."""

    def encode(self, text: str, utf8: bytes) -> np.ndarray:
        """Return the ids of a document, given as text and as UTF-8: shape (tokens,)."""
        ...


class ByteEncoder:
    """The default: one id for each byte of UTF-8."""

    name = BYTES
    vocab_size = BYTE_VOCAB_SIZE
    eod: int | None = BYTE_EOD
    training_flags: tuple[str, ...] = BYTE_TRAINING_FLAGS

    def encode(self, text: str, utf8: bytes) -> np.ndarray:
        """Return one id for each byte."""
        return byte_ids(utf8)


class UpstreamEncoder:
    """A tokenizer of Megatron, checked against its own vocabulary size."""

    def __init__(self, name: str, tokenizer: Any, training_flags: tuple[str, ...]) -> None:
        self.name = name
        self.training_flags = training_flags
        self.vocab_size = int(tokenizer.vocab_size)
        self.eod = _eod_of(tokenizer)
        self._tokenizer = tokenizer

    def encode(self, text: str, utf8: bytes) -> np.ndarray:
        """Return the tokenizer's ids.

        Raises:
            ValueError: an id outside the vocabulary, which would crash the embedding in training.
        """
        ids = np.asarray(self._tokenizer.tokenize(text), dtype=np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.vocab_size:
            raise ValueError(f"ids {ids.min()}..{ids.max()}, vocabulary of {self.vocab_size}")
        return ids


def dtype_for(vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """Return the smallest token type that Megatron's index allows for this vocabulary.

    The rule is that of ``DType.optimal_dtype`` (a test compares them); asking upstream would make
    every worker import torch.
    """
    return np.uint16 if vocab_size < 65500 else np.int32


def build_encoder(tokenizer_type: str, flags: Sequence[str]) -> Encoder:
    """Return the encoder for ``--tokenizer-type`` and the remaining command line.

    ``flags`` are parsed by upstream's own definition of its tokenizer flags, so whatever
    ``pretrain_gpt.py`` understands is understood here.

    Raises:
        UserError: an unknown flag, or a tokenizer that cannot be built.
    """
    if tokenizer_type == BYTES:
        if flags:
            raise UserError(
                f"{flags[0]}: not a flag of this tool; inputs are given with --input PATH"
            )
        return ByteEncoder()
    with quiet_imports():
        return _build_upstream(tokenizer_type, flags)


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Keep back what torch and Megatron warn about when they are loaded without a GPU."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(previous)


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _build_upstream(tokenizer_type: str, flags: Sequence[str]) -> Encoder:
    from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.config import TokenizerConfig

    parser = _OneLineParser(allow_abbrev=False, add_help=False)
    ArgumentGroupFactory(TokenizerConfig).build_group(parser, "tokenizer")
    # Upstream keeps this one with its fine-tuning flags, but build_tokenizer reads it.
    parser.add_argument("--sft-tokenizer-prompt-format", default="nemotron-h-aligned")
    all_flags = ("--tokenizer-type", tokenizer_type, *flags)
    args = parser.parse_args(all_flags)
    args.pad_vocab_size = False  # padding depends on the layout in training, not on the data
    try:
        return UpstreamEncoder(tokenizer_type, build_tokenizer(args), all_flags)
    except _BUILD_ERRORS as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UserError(
            f"--tokenizer-type {tokenizer_type}: cannot be built from these flags ({reason})"
        ) from error


def _eod_of(tokenizer: Any) -> int | None:
    """Return the id that ends a document, or None; the wrappers raise when they have none."""
    try:
        eod = tokenizer.eod
    except (AttributeError, NotImplementedError, KeyError, ValueError):
        return None
    return None if eod is None or int(eod) < 0 else int(eod)
