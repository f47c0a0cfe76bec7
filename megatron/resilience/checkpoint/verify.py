"""Finds damage in one ``torch_dist`` checkpoint directory before anything is loaded from it.

Upstream's ``--verify-integrity`` needs a manifest made at save time, hashes everything on rank 0
twice, and reports after initialisation. This check needs nothing at save time, is divided over
the ranks, and names the file and the tensor.

What each level finds (see ``archive`` for how content is checked):

* ``off``: a save that was never finished (a marker file is absent).
* ``size``: also missing and truncated files, torn or inconsistent metadata.
* ``full``: also changed content. When the checkpoint was saved with ``--verify-integrity``, the
  small files are compared with the SHA-256 in its manifest too (shards have their own checksums).

Promise: reads only; memory is one 4 MiB buffer plus the parsed metadata. Imports neither torch
nor Megatron. All ranks that pass the same ``of`` and different ``index`` cover every byte once.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.resilience.checkpoint.archive import BUFFER_BYTES, ArchiveError, check_archive
from megatron.resilience.checkpoint.damage import (
    LONGEST_NAME_CHARACTERS,
    LONGEST_PROBLEM_CHARACTERS,
    Damage,
    DamageKind,
)
from megatron.resilience.checkpoint.metadata import (
    METADATA_FILE,
    MetadataError,
    StoredItem,
    read_items,
)

type Level = Literal["full", "size", "off"]

CONFIG_FILE = "metadata.json"
"""Written by Megatron after every shard and ``.metadata``: marks a finished save."""
COMMON_FILE = "common.pt"
"""State outside tensors, in checkpoints of Megatron before 0.19."""
MANIFEST_FILE = "integrity.json"
"""SHA-256 of every file, when the checkpoint was saved with ``--verify-integrity``."""
SHARD_SUFFIX = ".distcp"
_BYTES_PER_GB = 1e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Outcome of checking one part of one checkpoint."""

    damages: tuple[Damage, ...]
    """Findings, in the order of files; empty when this part is sound."""
    checked_bytes: int
    """Bytes whose checksum was compared; 0 below level ``full``."""
    unchecked_bytes: int
    """Bytes that carry no checksum (saved with torch's CRC-32 off, or compressed)."""
    elapsed_s: float
    """Wall-clock time of this call."""

    @property
    def gb_per_s(self) -> float:
        """Verification speed in 1e9 bytes per second."""
        return self.checked_bytes / _BYTES_PER_GB / max(self.elapsed_s, 1e-9)


def verify_checkpoint(
    directory: Path, *, level: Level = "full", part: tuple[int, int] = (0, 1)
) -> Verification:
    """Check part ``part[0]`` of ``part[1]`` of the checkpoint in ``directory``.

    Damage to metadata is reported by every part; a missing or truncated shard by each part that
    needs it, in the same words, so that duplicates can be dropped by equality.

    Raises:
        ValueError: ``part`` is not ``(index, of)`` with ``0 <= index < of``.
    """
    index, of = part
    if not 0 <= index < of:
        raise ValueError(f"part is {part}, not (index, of) with 0 <= index < of")
    return _Check(Path(directory), level, index, of).run()


def divide(items: Sequence[StoredItem], index: int, of: int) -> list[StoredItem]:
    """Items of part ``index`` of ``of``: contiguous in the files, even in bytes to one item."""
    total_bytes = sum(item.length_bytes for item in items)
    mine, before_bytes = [], 0
    for item in items:
        middle = before_bytes + item.length_bytes / 2
        if min(of - 1, int(middle * of / max(1, total_bytes))) == index:
            mine.append(item)
        before_bytes += item.length_bytes
    return mine


class _Check:
    """One run over one directory; collects findings instead of stopping at the first."""

    def __init__(self, directory: Path, level: Level, index: int, of: int) -> None:
        self._directory, self._level, self._index, self._of = directory, level, index, of
        self._damages: dict[Damage, None] = {}  # an ordered set
        self._checked_bytes = self._unchecked_bytes = 0

    def run(self) -> Verification:
        started_s = time.monotonic()
        if self._finished() and self._level != "off":
            self._check_all()
        return Verification(
            damages=tuple(self._damages),
            checked_bytes=self._checked_bytes,
            unchecked_bytes=self._unchecked_bytes,
            elapsed_s=time.monotonic() - started_s,
        )

    def _add(self, kind: DamageKind, file: str, problem: str, tensor: str | None = None) -> None:
        damage = Damage(
            kind=kind,
            directory=str(self._directory),
            file=file[:LONGEST_NAME_CHARACTERS],
            problem=problem[:LONGEST_PROBLEM_CHARACTERS],
            tensor=tensor and tensor[:LONGEST_NAME_CHARACTERS],
        )
        self._damages[damage] = None

    def _finished(self) -> bool:
        if not self._directory.is_dir():
            self._add("missing", ".", "does not exist")
            return False
        for file in (METADATA_FILE, CONFIG_FILE):
            if not (self._directory / file).is_file():
                self._add("missing", file, "is missing (unfinished save or lost file)")
                return False
        return True

    def _check_all(self) -> None:
        self._check_config()
        if self._level == "full" and self._index == 0:
            self._check_manifest()
        try:
            items = read_items(self._directory)
        except MetadataError as error:
            self._add("inconsistent", METADATA_FILE, str(error))
        except OSError as error:
            self._add_unreadable(METADATA_FILE, error)
        else:
            self._check_files((*items, *self._common_items(items)))

    def _check_config(self) -> None:
        try:
            config = json.loads((self._directory / CONFIG_FILE).read_bytes())
            backend = config["sharded_backend"]
        except (ValueError, KeyError, TypeError) as error:
            self._add("inconsistent", CONFIG_FILE, f"is torn or damaged ({error!r})")
        except OSError as error:
            self._add_unreadable(CONFIG_FILE, error)
        else:
            if backend != "torch_dist":
                self._add("inconsistent", CONFIG_FILE, f"names format {backend!r}, not torch_dist")

    def _common_items(self, items: Iterable[StoredItem]) -> Iterator[StoredItem]:
        """``common.pt`` as an item; newer checkpoints keep its content in a shard."""
        path = self._directory / COMMON_FILE
        if path.is_file():
            yield StoredItem(
                file=COMMON_FILE,
                offset_bytes=0,
                length_bytes=path.stat().st_size,
                label="common state",
                least_data_bytes=0,
                transformed=False,
            )
        elif not any(item.label.startswith("common_state/") for item in items):
            self._add("missing", COMMON_FILE, "is missing: no other file holds the common state")

    def _check_files(self, items: tuple[StoredItem, ...]) -> None:
        ends_bytes: dict[str, int] = {}
        for item in items:
            end_bytes = item.offset_bytes + item.length_bytes
            ends_bytes[item.file] = max(ends_bytes.get(item.file, 0), end_bytes)
        by_file: dict[str, list[StoredItem]] = {}
        for item in divide(items, self._index, self._of):
            by_file.setdefault(item.file, []).append(item)
        buffer = bytearray(BUFFER_BYTES)
        for file, own_items in by_file.items():
            try:
                self._check_file(file, ends_bytes[file], own_items, buffer)
            except FileNotFoundError:
                self._add("missing", file, "is missing")
            except OSError as error:
                self._add_unreadable(file, error)

    def _check_file(
        self, file: str, end_bytes: int, items: list[StoredItem], buffer: bytearray
    ) -> None:
        size_bytes = (self._directory / file).stat().st_size
        if size_bytes < end_bytes:
            problem = f"is truncated: {size_bytes} bytes of at least {end_bytes}"
            self._add("truncated", file, problem)
        elif size_bytes == 0:
            self._add("truncated", file, "is empty")
        elif self._level == "full":
            with (self._directory / file).open("rb", buffering=0) as stream:
                for item in items:
                    self._check_item(stream, item, buffer)

    def _check_item(self, stream: object, item: StoredItem, buffer: bytearray) -> None:
        if item.transformed:
            self._unchecked_bytes += item.length_bytes
            return
        try:
            check = check_archive(
                stream,  # type: ignore[arg-type]
                offset_bytes=item.offset_bytes,
                length_bytes=item.length_bytes,
                least_data_bytes=item.least_data_bytes,
                buffer=buffer,
            )
        except ArchiveError as error:
            self._add("content", item.file, str(error), item.label)
        else:
            self._checked_bytes += check.checked_bytes
            self._unchecked_bytes += check.unchecked_bytes

    def _check_manifest(self) -> None:
        """Compare the small files with the SHA-256 that ``--verify-integrity`` stored."""
        path = self._directory / MANIFEST_FILE
        if not path.is_file():
            return
        try:
            manifest = json.loads(path.read_bytes())
            algorithm, files = manifest["algorithm"], dict(manifest["files"])
        except (ValueError, KeyError, TypeError) as error:
            self._add("inconsistent", MANIFEST_FILE, f"is torn or damaged ({error!r})")
            return
        if algorithm != "sha256":
            return
        for file, expected in files.items():
            self._check_manifest_entry(file, expected)

    def _check_manifest_entry(self, file: str, expected: object) -> None:
        if file != Path(file).name or file.endswith(SHARD_SUFFIX):
            return
        try:
            content = (self._directory / file).read_bytes()
        except FileNotFoundError:
            self._add("missing", file, f"is missing, though {MANIFEST_FILE} lists it")
        except OSError as error:
            self._add_unreadable(file, error)
        else:
            if hashlib.sha256(content).hexdigest() != expected:
                self._add("content", file, f"does not match its SHA-256 in {MANIFEST_FILE}")

    def _add_unreadable(self, file: str, error: OSError) -> None:
        reason = error.strerror or type(error).__name__
        self._add("unreadable", file, f"cannot be read: {reason}")
