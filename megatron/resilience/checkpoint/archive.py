"""Checks one ``torch.save`` archive inside a shard file against the checksums stored with it.

Every item of a ``.distcp`` file is a zip archive whose records carry the CRC-32 that torch
computed when it wrote them. Comparing them finds changed content in checkpoints that plain
Megatron wrote, without any change at save time and without building a tensor.

Promise: reads through one fixed buffer, whatever the size of the tensor. Never unpickles.
"""

import io
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import BinaryIO, override

BUFFER_BYTES = 4 << 20
"""Large enough that per-read costs vanish, small enough to stay in the last-level cache."""
_LOCAL_HEADER = struct.Struct("<4sHHHHHIIIHH")
_LOCAL_SIGNATURE = b"PK\x03\x04"
_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_SIZE_COUNTS_FROM_BYTES = 12
_INDEX_ENTRY = struct.Struct("<28x3H12x")
_LOCATOR64 = struct.Struct("<4sIQI")
_DIRECTORY_ATTRIBUTE = 0x10
_KNOWN_FLAGS = 0x808
"""Name in UTF-8, sizes after the content: what torch sets. Others change how it reads."""

_BROKEN_ZIP = (
    zipfile.BadZipFile,
    NotImplementedError,  # "version needed" or compression that no archive of torch's has
    ValueError,
    OverflowError,
    EOFError,
    struct.error,
)
"""What ``zipfile`` raises for a damaged central directory."""


class ArchiveError(Exception):
    """The bytes are not the archive that was written; completes "FILE: ITEM ..."."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveCheck:
    """What was compared."""

    checked_bytes: int
    """Content whose checksum was compared and matched."""
    unchecked_bytes: int
    """Content that was saved with torch's checksums switched off."""


class _Window(io.RawIOBase):
    """Read-only view of ``length_bytes`` of ``file`` from ``start_bytes``; as ``zipfile`` needs."""

    def __init__(self, file: BinaryIO, start_bytes: int, length_bytes: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._position = file, start_bytes, length_bytes, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._position

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("seek before the start of the archive")  # as files do: zipfile knows it
        self._position = base + offset
        return self._position

    @override
    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), max(0, self._length - self._position))
        self._file.seek(self._start + self._position)
        count: int = self._file.readinto(memoryview(buffer)[:wanted])  # type: ignore[attr-defined]
        self._position += count
        return count


def check_archive(
    file: BinaryIO,
    *,
    offset_bytes: int,
    length_bytes: int,
    least_data_bytes: int,
    buffer: bytearray,
) -> ArchiveCheck:
    """Compare every record of the archive at ``offset_bytes`` with its stored CRC-32.

    Args:
        file: opened unbuffered for reading in binary.
        offset_bytes: where the archive begins in ``file``.
        length_bytes: its length; the file must be at least that long.
        least_data_bytes: what the tensor's storage record must hold at least.
        buffer: scratch space, reused between calls.

    Raises:
        ArchiveError: the content differs from what was written.
        OSError: the file cannot be read.
    """
    window = _Window(file, offset_bytes, length_bytes)
    checked = unchecked = data_bytes = 0
    has_root = False
    records = _records(window)
    # torch.serialization.set_crc32_options(False) stores 0 for every record.
    without_checksums = all(record.CRC == 0 for record in records)
    for record in records:
        start = _content_start(window, record)
        crc = _crc32(window, start, record.file_size, buffer)
        if crc == record.CRC:
            checked += record.file_size
        elif without_checksums:
            unchecked += record.file_size
        else:
            first, last = offset_bytes + start, offset_bytes + start + record.file_size
            raise ArchiveError(
                f"does not match its checksum (CRC-32 {crc:08x}, stored {record.CRC:08x}, "
                f"bytes {first} to {last})"
            )
        has_root = has_root or record.filename.endswith("/data.pkl")
        if record.filename.endswith("/data/0"):
            data_bytes = record.file_size
    if not has_root:
        raise ArchiveError("is not a torch.save archive (it has no data.pkl)")
    if data_bytes < least_data_bytes:
        raise ArchiveError(f"holds {data_bytes} bytes of data where {least_data_bytes} belong")
    return ArchiveCheck(checked_bytes=checked, unchecked_bytes=unchecked)


def _records(window: _Window) -> list[zipfile.ZipInfo]:
    try:
        with zipfile.ZipFile(window) as archive:
            records = archive.infolist()
            _check_structure(window, len(records), archive.start_dir)
            return records
    except _BROKEN_ZIP as error:
        raise ArchiveError(f"is damaged: its archive has no readable index ({error})") from None


def _check_structure(window: _Window, count: int, index_start: int) -> None:
    """Check what torch's reader insists on and ``zipfile`` ignores: the index and what follows."""
    window.seek(-_END.size, io.SEEK_END)
    end_start = window.tell()
    end = _END.unpack(window.read(_END.size) or b"")
    sound = end[1:5] == (0, 0, count, count) and end[7] == 0
    locator_start = end_start - _LOCATOR64.size
    window.seek(max(0, locator_start))
    locator = window.read(_LOCATOR64.size) or b""
    index_end = end_start
    if locator.startswith(b"PK\x06\x07"):
        _, disk, index_end, disks = _LOCATOR64.unpack(locator)
        window.seek(index_end)
        end64 = _END64.unpack(window.read(_END64.size) or b"")
        sound = sound and end64[4:8] == (0, 0, count, count) and end64[9] == index_start
        sound = sound and end64[1] == _END64.size - _SIZE_COUNTS_FROM_BYTES
        sound = sound and (disk, disks, index_end + _END64.size) == (0, 1, locator_start)
    if not sound or _index_end(window, count, index_start) != index_end:
        raise ArchiveError("is damaged: the end of its archive contradicts its index")


def _index_end(window: _Window, count: int, index_start: int) -> int:
    """Where the index ends by the lengths that its own entries claim."""
    position = index_start
    for _ in range(count):
        window.seek(position)
        lengths = _INDEX_ENTRY.unpack(window.read(_INDEX_ENTRY.size) or b"")
        position += _INDEX_ENTRY.size + sum(lengths)
    return position


def _content_start(window: _Window, record: zipfile.ZipInfo) -> int:
    """Offset of the record's content; checks the local header, which gives that offset."""
    window.seek(max(0, record.header_offset))
    header = window.read(_LOCAL_HEADER.size) or b""
    if len(header) < _LOCAL_HEADER.size or not header.startswith(_LOCAL_SIGNATURE):
        raise ArchiveError(f"is damaged: record {record.filename!r} has no header")
    name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)[-2:]
    name = window.read(name_bytes) or b""
    if name != record.orig_filename.encode("utf-8" if record.flag_bits & 0x800 else "cp437"):
        raise ArchiveError(f"is damaged: record {record.filename!r} has another name in its header")
    is_directory = record.external_attr & _DIRECTORY_ATTRIBUTE
    if record.flag_bits & ~_KNOWN_FLAGS or record.volume or is_directory:
        raise ArchiveError(f"is damaged: record {record.filename!r} has unknown flags")
    if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
        raise ArchiveError(f"is damaged: record {record.filename!r} is marked as compressed")
    return int(record.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes)


def _crc32(window: _Window, start: int, size_bytes: int, buffer: bytearray) -> int:
    view = memoryview(buffer)
    window.seek(start)
    crc, left = 0, size_bytes
    while left > 0:
        count = window.readinto(view[: min(left, len(buffer))])
        if count == 0:
            raise ArchiveError(f"ends {left} bytes early")
        crc = zlib.crc32(view[:count], crc)
        left -= count
    return crc
