"""What a worker does with one chunk: bytes -> documents -> tokens, leaving out what is bad.

Promise: a pure function of the chunk; never raises for bad input, which is returned by kind with
file and line instead.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from megatron.resilience.data.preprocess.encoders import Encoder, dtype_for
from megatron.resilience.data.preprocess.python_source import split_source
from megatron.resilience.data.preprocess.records import (
    BadInput,
    BadKind,
    BadRecord,
    Chunk,
    ChunkResult,
    FileBatch,
    FileForm,
    LineBlock,
    LineForm,
)
from megatron.resilience.data.preprocess.streams import SourceError, read_whole

_BOM = b"\xef\xbb\xbf"
_DETAIL_CHARS = 160


class _BadDocumentError(Exception):
    """One document that cannot be used."""

    def __init__(self, kind: BadKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


_Read = Callable[[], str]
"""Produces the text of one document; raises _BadDocumentError or SourceError."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkEncoder:
    """The work of a worker: call it with a chunk."""

    encoder: Encoder
    json_key: str
    append_eod: bool
    max_document_bytes: int

    def __call__(self, chunk: Chunk) -> ChunkResult:
        """Return the tokens of all good documents of ``chunk``, in order."""
        if isinstance(chunk, BadInput):
            return _Collector(self.encoder).result(chunk, bad=((0, chunk.record),))
        collector = _Collector(self.encoder)
        bad: list[tuple[int, BadRecord]] = []
        for path, line, read in self._documents(chunk):
            try:
                collector.add(*self._encode(read()))
            except (_BadDocumentError, SourceError) as error:
                detail = " ".join(error.detail.split())[:_DETAIL_CHARS]
                record = BadRecord(path=path, line=line, kind=error.kind, detail=detail)
                bad.append((collector.documents, record))
        return collector.result(chunk, bad=tuple(bad))

    def _documents(self, chunk: FileBatch | LineBlock) -> Iterator[tuple[str, int, _Read]]:
        """Yield (path, line, how to read it) of each document."""
        if isinstance(chunk, FileBatch):
            for path in chunk.paths:
                if chunk.form is FileForm.PYTHON:
                    yield from self._definitions(path)
                else:
                    yield path, 0, partial(self._file, path)
            return
        lines = chunk.data.split(b"\n")
        if not lines[-1]:
            lines.pop()  # what follows the last newline is not a line
        parse = self._json_line if chunk.form is LineForm.JSONL else self._text_line
        for line, data in enumerate(lines, start=chunk.first_line):
            raw = data.removeprefix(_BOM) if line == 1 else data
            yield chunk.path, line, partial(parse, raw)

    def _definitions(self, path: str) -> Iterator[tuple[str, int, _Read]]:
        try:
            text = self._file(path)
        except (_BadDocumentError, SourceError) as error:
            yield path, 0, partial(_fail, error)
            return
        for line, document in split_source(text):
            yield path, line, partial(str, document)

    def _file(self, path: str) -> str:
        data = read_whole(path, max_bytes=self.max_document_bytes)
        return _decode(data.removeprefix(_BOM))

    def _text_line(self, line: bytes) -> str:
        return _decode(self._bounded(line).removesuffix(b"\r"))

    def _json_line(self, line: bytes) -> str:
        text = _decode(self._bounded(line))
        if not text.strip():
            raise _BadDocumentError(BadKind.EMPTY, "blank line")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise _BadDocumentError(BadKind.MALFORMED_JSON, str(error)) from error
        if not isinstance(value, dict):
            kind = type(value).__name__
            raise _BadDocumentError(BadKind.MALFORMED_JSON, f"a JSON object is needed, not {kind}")
        if self.json_key not in value:
            keys = ", ".join(sorted(value)[:5]) or "none"
            raise _BadDocumentError(BadKind.MISSING_KEY, f"no key {self.json_key!r}; keys: {keys}")
        document = value[self.json_key]
        if not isinstance(document, str):
            kind = type(document).__name__
            raise _BadDocumentError(BadKind.NOT_TEXT, f"{self.json_key!r} is {kind}, not a string")
        return document

    def _bounded(self, line: bytes) -> bytes:
        if len(line) > self.max_document_bytes:
            detail = f"line of more than {self.max_document_bytes} bytes"
            raise _BadDocumentError(BadKind.TOO_LARGE, detail)
        return line

    def _encode(self, text: str) -> tuple[np.ndarray, int]:
        """Return (ids with end of document, UTF-8 bytes of the text)."""
        if not text or text.isspace():
            raise _BadDocumentError(BadKind.EMPTY, "no text")
        try:
            utf8 = text.encode("utf-8")
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
            raise _BadDocumentError(BadKind.BAD_UTF8, str(error)) from error
        try:
            ids = self.encoder.encode(text, utf8)
        except MemoryError:
            raise
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            raise _BadDocumentError(BadKind.UNTOKENIZABLE, detail) from error
        if not ids.size:
            raise _BadDocumentError(BadKind.EMPTY, "no tokens")
        if self.append_eod and self.encoder.eod is not None:
            ids = np.append(ids, self.encoder.eod)
        return ids, len(utf8)


class _Collector:
    """Gathers the documents of one chunk."""

    def __init__(self, encoder: Encoder) -> None:
        self._dtype = dtype_for(encoder.vocab_size)
        self._ids: list[np.ndarray] = []
        self._text_bytes: list[int] = []

    @property
    def documents(self) -> int:
        return len(self._ids)

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        self._ids.append(ids.astype(self._dtype, copy=False))
        self._text_bytes.append(text_bytes)

    def result(self, chunk: Chunk, *, bad: tuple[tuple[int, BadRecord], ...]) -> ChunkResult:
        return ChunkResult(
            tokens=np.concatenate([np.empty(0, self._dtype), *self._ids]),
            lengths=np.array([ids.size for ids in self._ids], dtype=np.int64),
            text_bytes=np.array(self._text_bytes, dtype=np.int64),
            bad=bad,
            files=len(chunk.paths) if isinstance(chunk, FileBatch) else int(chunk.starts_file),
            source_bytes=chunk.source_bytes,
        )


def _fail(error: Exception) -> str:
    raise error


def _decode(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        detail = f"{error.reason} at byte {error.start}"
        raise _BadDocumentError(BadKind.BAD_UTF8, detail) from error
