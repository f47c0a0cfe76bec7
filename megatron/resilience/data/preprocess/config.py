"""What a run of the preprocessor can be asked for, checked before anything is read.

Promise: a :class:`PreprocessConfig` that exists is consistent in itself; whether its files exist is
found by ``sources`` and ``writer``.
"""

from dataclasses import dataclass
from enum import StrEnum

from resihp_ext.errors import UserError


class InputFormat(StrEnum):
    """How the bytes of an input file become documents."""

    AUTO = "auto"
    """By name: ``.jsonl``, ``.ndjson`` and ``.json`` (also compressed) are JSONL, others text."""
    TEXT = "text"
    """One document for each file."""
    LINES = "lines"
    """One document for each line."""
    PYTHON = "python"
    """Python source: one document for each top-level definition and for the code between them."""
    JSONL = "jsonl"
    """One JSON object for each line, the document under ``json_key``."""


class OnBadInput(StrEnum):
    """What to do with a document that cannot be used."""

    SKIP = "skip"
    FAIL = "fail"


@dataclass(frozen=True, kw_only=True, slots=True)
class PreprocessConfig:
    """One run: what to read, how to treat it, where to write."""

    output_prefix: str
    """The dataset is ``output_prefix`` + ``.bin`` and ``.idx``."""
    inputs: tuple[str, ...] = ()
    """Files and directories, read in this order; a directory in the order of its sorted paths."""
    stdlib: bool = False
    """Read the sources of Python's standard library, after ``inputs``."""
    input_format: InputFormat = InputFormat.AUTO
    """How files become documents."""
    globs: tuple[str, ...] = ()
    """Which files of a directory to read: patterns on names, or with ``/`` on paths below it."""
    json_key: str = "text"
    """The key of a JSONL object that holds the document."""
    append_eod: bool = True
    """End every document with the tokenizer's end-of-document id."""
    workers: int = 1
    """Processes that encode. The output does not depend on their number."""
    overwrite: bool = False
    """Replace an existing dataset of the same prefix, once the new one is complete."""
    on_bad_input: OnBadInput = OnBadInput.SKIP
    """Leave bad documents out, or stop at the first. Empty documents are always left out."""
    max_bad_fraction: float = 0.01
    """No dataset is written when more than this part of the documents, or of the files, is bad."""
    max_documents: int | None = None
    """Stop after this many documents."""
    limit_bytes: int | None = None
    """Stop before the document with which the text would exceed this many bytes."""
    max_document_bytes: int = 256 * 10**6
    """A larger document is bad: it would have to fit in memory several times over."""
    worker_timeout_s: float = 600.0
    """How long all workers may be silent before the run gives up."""

    def __post_init__(self) -> None:
        if not self.inputs and not self.stdlib:
            raise UserError("nothing to read: give --input PATH, or --stdlib for Python's library")
        if self.workers < 1:
            raise UserError(f"--workers {self.workers}: at least 1 is needed")
        if not 0.0 <= self.max_bad_fraction <= 1.0:
            raise UserError(f"--max-bad-fraction {self.max_bad_fraction}: give a part from 0 to 1")
        for flag, value in (
            ("--max-documents", self.max_documents),
            ("--limit-mb", self.limit_bytes),
            ("--max-document-mb", self.max_document_bytes),
            ("--worker-timeout-s", self.worker_timeout_s),
        ):
            if value is not None and value <= 0:
                raise UserError(f"{flag} must be above 0")
        if self.max_document_bytes >= 2**31 - 1:
            raise UserError("--max-document-mb: the index counts in 32 bits, stay below 2147")
        if not self.output_prefix or self.output_prefix.endswith("/"):
            raise UserError(f"--output-prefix {self.output_prefix!r}: give DIRECTORY/NAME")
