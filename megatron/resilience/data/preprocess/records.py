"""What travels between the reader, the workers and the writer: chunks, results, bad input.

Promise: frozen data, cheap to pickle; the order of documents is in the data, not in timing.
"""

import os
from dataclasses import dataclass
from enum import StrEnum

import numpy as np


class BadKind(StrEnum):
    """Why a document or a file was left out."""

    MALFORMED_JSON = "malformed_json"
    MISSING_KEY = "missing_key"
    NOT_TEXT = "not_text"
    BAD_UTF8 = "bad_utf8"
    TOO_LARGE = "too_large"
    UNTOKENIZABLE = "untokenizable"
    UNREADABLE = "unreadable"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    EMPTY = "empty"


FILE_KINDS = frozenset({BadKind.UNREADABLE, BadKind.TRUNCATED, BadKind.CORRUPT})
"""Kinds that cost the rest of a file: how many documents were lost is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRecord:
    """One thing that was left out, and where it stands."""

    path: str
    line: int
    """Counted from 1; 0 when it concerns the whole file."""
    kind: BadKind
    detail: str

    def __str__(self) -> str:
        # Undecodable file names would otherwise make the report itself fail to print.
        path = os.fsencode(self.path).decode("utf-8", errors="replace")
        where = f"{path}:{self.line}" if self.line else path
        return f"{where}: {self.kind}: {self.detail}"


class LineForm(StrEnum):
    """What a line of a :class:`LineBlock` is."""

    JSONL = "jsonl"
    LINES = "lines"


class FileForm(StrEnum):
    """How a file of a :class:`FileBatch` becomes documents."""

    TEXT = "text"
    PYTHON = "python"


@dataclass(frozen=True, kw_only=True, slots=True)
class FileBatch:
    """Whole files; the worker reads them."""

    paths: tuple[str, ...]
    form: FileForm
    source_bytes: int
    """Size on disk, for progress."""

    @property
    def where(self) -> str:
        """Name the chunk for people."""
        return f"{self.paths[0]} and {len(self.paths) - 1} more files"


@dataclass(frozen=True, kw_only=True, slots=True)
class LineBlock:
    """Complete lines of one file, already decompressed."""

    path: str
    first_line: int
    """Number of the first line in its file, counted from 1."""
    data: bytes
    form: LineForm
    source_bytes: int
    starts_file: bool
    """Whether it is the first chunk of its file, for counting files."""

    @property
    def where(self) -> str:
        """Name the chunk for people."""
        return f"{self.path} from line {self.first_line}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BadInput:
    """Something the reader itself had to leave out; passes through a worker to keep its place."""

    record: BadRecord
    source_bytes: int = 0
    starts_file: bool = True

    @property
    def where(self) -> str:
        """Name the chunk for people."""
        return self.record.path


Chunk = FileBatch | LineBlock | BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkResult:
    """The documents of one chunk, in order."""

    tokens: np.ndarray
    """All tokens one after the other: shape (sum(lengths),), the dtype of the dataset."""
    lengths: np.ndarray
    """Tokens of each document, end of document included: shape (documents,), int64."""
    text_bytes: np.ndarray
    """UTF-8 bytes of each document: shape (documents,), int64."""
    bad: tuple[tuple[int, BadRecord], ...]
    """What was left out, each with the number of good documents of this chunk before it."""
    files: int
    """Files that begin in this chunk."""
    source_bytes: int
