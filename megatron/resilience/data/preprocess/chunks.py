"""Cutting the sources into chunks of about a megabyte that workers encode independently.

Promise: the cuts depend on the sources alone, never on the number of workers; one line or file is
never split; memory is bounded by the chunk size plus one document.
"""

from collections.abc import Iterator

from megatron.resilience.data.preprocess.config import InputFormat
from megatron.resilience.data.preprocess.records import (
    BadInput,
    BadKind,
    BadRecord,
    Chunk,
    FileBatch,
    FileForm,
    LineBlock,
    LineForm,
)
from megatron.resilience.data.preprocess.sources import SourceFile, Sources
from megatron.resilience.data.preprocess.streams import InputReader, SourceError

CHUNK_BYTES = 1 << 20
_CHUNK_FILES = 256
_WHOLE = (InputFormat.TEXT, InputFormat.PYTHON)
"""Forms whose files are read as a whole, by the workers."""


def plan_chunks(sources: Sources, *, max_document_bytes: int) -> Iterator[Chunk]:
    """Yield all chunks in the order of the documents. Reads files of lines, not whole files."""
    batch: list[SourceFile] = []
    batch_bytes = 0
    for entry in sources.entries:
        is_full = batch_bytes >= CHUNK_BYTES or len(batch) >= _CHUNK_FILES
        if batch and (is_full or isinstance(entry, BadRecord) or entry.form is not batch[0].form):
            yield _file_batch(batch)
            batch, batch_bytes = [], 0
        if isinstance(entry, BadRecord):
            yield BadInput(record=entry)
        elif entry.form in _WHOLE:
            batch.append(entry)
            batch_bytes += entry.size_bytes
        else:
            yield from _LineCutter(entry, max_document_bytes).blocks()
    if batch:
        yield _file_batch(batch)


def _file_batch(batch: list[SourceFile]) -> FileBatch:
    return FileBatch(
        paths=tuple(source.path for source in batch),
        form=FileForm(batch[0].form.value),
        source_bytes=sum(source.size_bytes for source in batch),
    )


class _LineCutter:
    """Cuts one file into blocks of complete lines and keeps count of the lines."""

    def __init__(self, source: SourceFile, max_line_bytes: int) -> None:
        self._path = source.path
        self._form = LineForm(source.form.value)
        self._max_line_bytes = max_line_bytes
        self._pending = bytearray()
        self._complete_bytes = 0  # length of the part of _pending that ends with its last newline
        self._line = 1
        self._in_overlong_line = False
        self._reported_bytes = 0
        self._is_started = False

    def blocks(self) -> Iterator[Chunk]:
        """Yield the blocks; damage becomes a :class:`BadInput` after the lines before it."""
        try:
            with InputReader(self._path) as reader:
                while piece := reader.read_some():
                    yield from self._feed(piece, reader.position_bytes)
                self._complete_bytes = len(self._pending)  # the last line may lack its newline
                yield from self._drain(reader.position_bytes)
        except SourceError as error:
            yield from self._drain(self._reported_bytes)
            yield self._bad(error.kind, error.detail)

    def _feed(self, piece: bytes, position_bytes: int) -> Iterator[Chunk]:
        """Take in decompressed bytes; yield what is ready."""
        if self._in_overlong_line:
            end = piece.find(b"\n")
            if end < 0:
                return
            piece = piece[end + 1 :]
            self._in_overlong_line = False
            self._line += 1
        newline = piece.rfind(b"\n")
        if newline >= 0:
            self._complete_bytes = len(self._pending) + newline + 1
        self._pending += piece
        if self._complete_bytes >= CHUNK_BYTES:
            yield from self._drain(position_bytes)
        if len(self._pending) - self._complete_bytes > self._max_line_bytes:
            yield from self._drain(position_bytes)
            yield self._bad(BadKind.TOO_LARGE, f"line of more than {self._max_line_bytes} bytes")
            self._pending.clear()
            self._in_overlong_line = True

    def _drain(self, position_bytes: int) -> Iterator[Chunk]:
        """Yield the complete lines that are pending."""
        if not self._complete_bytes:
            return
        data = bytes(self._pending[: self._complete_bytes])
        del self._pending[: self._complete_bytes]
        self._complete_bytes = 0
        first_line = self._line
        self._line += data.count(b"\n")
        source_bytes = position_bytes - self._reported_bytes
        self._reported_bytes = position_bytes
        yield LineBlock(
            path=self._path,
            first_line=first_line,
            data=data,
            form=self._form,
            source_bytes=source_bytes,
            starts_file=self._first(),
        )

    def _bad(self, kind: BadKind, detail: str) -> BadInput:
        record = BadRecord(path=self._path, line=self._line, kind=kind, detail=detail)
        return BadInput(record=record, starts_file=self._first())

    def _first(self) -> bool:
        is_first = not self._is_started
        self._is_started = True
        return is_first
