"""The dataset on disk: both files complete under their final names, or nothing.

Promise: everything is written to ``PREFIX.bin.partial`` and ``PREFIX.idx.partial`` beside the
target (same file system, so renaming is atomic), flushed to the disk, and renamed at the very end,
``.bin`` before ``.idx``: an ``.idx`` never exists beside a ``.bin`` that is not its own. Whatever
goes wrong before that removes both partial files. Only SIGKILL or a power failure can leave them;
the next run of the same prefix takes them over. Two runs of one prefix exclude each other.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

import numpy as np

from megatron.resilience.data.preprocess.encoders import quiet_imports
from resihp_ext.errors import UserError

_PARTIAL = ".partial"


class DatasetWriter:
    """Writes one dataset. Use as a context manager; leaving it unpublished removes all traces."""

    def __init__(self, prefix: str, *, dtype: type[np.number[Any]], overwrite: bool) -> None:
        """Check the target and create its directory; no file is made before the first document.

        Raises:
            UserError: the dataset exists and ``overwrite`` is off, or its place is unusable.
        """
        self._bin, self._idx = prefix + ".bin", prefix + ".idx"
        self._dtype = dtype
        self._builder: Any = None
        self._lock: int | None = None
        self._is_published = False
        self.import_s = 0.0
        """Time that loading Megatron took, in seconds."""
        existing = [path for path in (self._bin, self._idx) if os.path.lexists(path)]
        if existing and not overwrite:
            raise UserError(f"{existing[0]} exists; choose another --output-prefix, or --overwrite")
        with self._disk_errors():
            os.makedirs(os.path.dirname(prefix) or ".", exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._builder is not None:
            # Closing flushes, which fails again on a full disk: the file goes away anyhow.
            with suppress(OSError):
                self._builder.data_file.close()
        if self._lock is not None:
            # Published: the partial names are free, and may be those of the next run by now.
            for path in () if self._is_published else (self._bin, self._idx):
                with suppress(FileNotFoundError):
                    os.unlink(path + _PARTIAL)
            os.close(self._lock)
            self._lock = None

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents.

        Args:
            tokens: all tokens one after the other, shape (sum(lengths),), in the dataset's dtype.
            lengths: tokens of each document, shape (documents,).

        Raises:
            UserError: the disk is full or fails.
        """
        with self._disk_errors():
            if self._builder is None:
                self._open()
            start = 0
            for length in lengths.tolist():
                self._builder.add_document(tokens[start : start + length], [length])
                start += length

    def finish(self) -> None:
        """Write the index and force both files to the disk, still under their partial names.

        Raises:
            UserError: the disk is full or fails.
        """
        with self._disk_errors():
            self._builder.finalize(self._idx + _PARTIAL)
            _sync(self._bin + _PARTIAL)
            _sync(self._idx + _PARTIAL)

    def publish(self) -> None:
        """Give both files their final names. Must not be interrupted.

        Raises:
            UserError: the names cannot be changed; then neither file is left.
        """
        with self._disk_errors():
            # The old index goes first: it must never be seen beside the new data.
            with suppress(FileNotFoundError):
                os.unlink(self._idx)
            os.replace(self._bin + _PARTIAL, self._bin)
            try:
                os.replace(self._idx + _PARTIAL, self._idx)
            except OSError:
                os.unlink(self._bin)
                raise
            self._is_published = True
        # The names are in place; some file systems refuse to sync a directory.
        with suppress(OSError):
            _sync(os.path.dirname(self._bin) or ".")

    def _open(self) -> None:
        self._lock = _lock(self._bin + _PARTIAL)
        start_s = time.monotonic()
        # Late, because it takes seconds: wrong input is reported, and workers are forked, before.
        with quiet_imports():
            from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
        self.import_s = time.monotonic() - start_s
        self._builder = IndexedDatasetBuilder(self._bin + _PARTIAL, dtype=self._dtype)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            place = error.filename or self._bin + _PARTIAL
            raise UserError(
                f"cannot write {place}: {error.strerror or error}; no dataset was written, "
                "free space or choose another --output-prefix"
            ) from error


def _lock(path: str) -> int:
    """Create ``path`` if needed and hold it; return the descriptor that holds it.

    Raises:
        UserError: another run holds it.
    """
    while True:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(descriptor)
            raise UserError(
                f"{path} is being written by another run; wait for it or choose another "
                "--output-prefix"
            ) from error
        except OSError:
            return descriptor  # a file system without locks: go on without
        # Another run may have renamed or removed the file between our open and our lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
