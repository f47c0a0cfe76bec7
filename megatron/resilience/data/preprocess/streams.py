"""Reading one input file, plain, gzip or zstd, with every kind of damage told apart.

Promise: whatever was read before the damage is returned first; damage arrives as a
:class:`SourceError`, never as a silent end of file.
"""

import gzip
import zlib
from types import TracebackType
from typing import BinaryIO, Protocol, Self

import zstandard

from megatron.resilience.data.preprocess.records import BadKind

_READ_BYTES = 256 * 1024
# A zstd block can expand by 32768: small bites bound what one call can return (256 MiB at worst).
_ZSTD_BITE_BYTES = 8 * 1024


class SourceError(Exception):
    """An input file cannot be read, or not to its end."""

    def __init__(self, kind: BadKind, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail


class _Read1(Protocol):
    def read1(self, size: int, /) -> bytes: ...


class _ZstdFrames:
    """All frames of a zstd file. The library's own reader takes a truncated frame for the end."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._left = b""

    def read1(self, _size: int, /) -> bytes:
        """Return some bytes, or none at the end. Raises: EOFError inside a frame."""
        while True:
            bite = self._left or self._raw.read(_ZSTD_BITE_BYTES)
            self._left = b""
            if not bite:
                if self._frame is not None:
                    raise EOFError("the file ends inside a zstd frame")
                return b""
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            out = self._frame.decompress(bite)
            if self._frame.eof:
                self._left = self._frame.unused_data
                self._frame = None
            if out:
                return out


class InputReader:
    """One open input file; the suffix ``.gz`` or ``.zst`` chooses the decompression."""

    def __init__(self, path: str) -> None:
        """Open ``path``.

        Raises:
            SourceError: it cannot be opened.
        """
        try:
            self._raw = open(path, "rb")  # noqa: SIM115 - closed by __exit__
        except OSError as error:
            raise SourceError(BadKind.UNREADABLE, error.strerror or str(error)) from error
        self._stream: _Read1
        if path.endswith(".gz"):
            self._stream = gzip.GzipFile(fileobj=self._raw, mode="rb")
        elif path.endswith(".zst"):
            self._stream = _ZstdFrames(self._raw)
        else:
            self._stream = self._raw

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._raw.close()

    @property
    def position_bytes(self) -> int:
        """How far into the file on disk reading has come."""
        return self._raw.tell()

    def read_some(self) -> bytes:
        """Return some decompressed bytes; none means a sound end of file.

        Raises:
            SourceError: truncated, corrupt or unreadable from here on.
        """
        # read1, not read: read(n) drops what it has decompressed when the damage comes before n.
        try:
            return self._stream.read1(_READ_BYTES)
        except EOFError as error:
            detail = "the compressed file ends too early"
            raise SourceError(BadKind.TRUNCATED, detail) from error
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise SourceError(BadKind.CORRUPT, str(error)) from error
        except OSError as error:
            raise SourceError(BadKind.UNREADABLE, error.strerror or str(error)) from error


def read_whole(path: str, *, max_bytes: int) -> bytes:
    """Return the whole decompressed content of ``path``.

    Raises:
        SourceError: it cannot be read to its end, or holds more than ``max_bytes``.
    """
    pieces = []
    size_bytes = 0
    with InputReader(path) as reader:
        while piece := reader.read_some():
            size_bytes += len(piece)
            if size_bytes > max_bytes:
                raise SourceError(BadKind.TOO_LARGE, f"more than {max_bytes} bytes")
            pieces.append(piece)
    return b"".join(pieces)
