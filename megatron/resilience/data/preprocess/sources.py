"""Which files are read, and in which order.

Promise: the list is a function of the inputs and of the file system's content only: directories are
walked in sorted order, so the same tree gives the same dataset on every machine.
"""

import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from megatron.resilience.data.preprocess.config import InputFormat, PreprocessConfig
from megatron.resilience.data.preprocess.records import BadKind, BadRecord
from resihp_ext.errors import UserError

_CODE = ("py", "pyi", "pyx", "c", "h", "cc", "cpp", "cxx", "hpp", "cu", "cuh", "java", "go", "rs")
_MORE_CODE = ("kt", "scala", "js", "jsx", "ts", "tsx", "rb", "php", "lua", "r", "jl", "swift", "cs")
_SCRIPTS = ("sh", "bash", "sql", "html", "css", "xml", "toml", "yaml", "yml", "ini", "cfg")
_PROSE = ("md", "rst", "tex", "txt", "jsonl", "jsonl.gz", "jsonl.zst")
TREE_GLOBS = tuple(f"*.{suffix}" for suffix in (*_CODE, *_MORE_CODE, *_SCRIPTS, *_PROSE))
"""What is read of a directory when no ``--glob`` is given: source code, prose and JSONL shards."""

_JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
_SKIPPED_DIRECTORIES = frozenset({"__pycache__", "node_modules"})
_FOREIGN_PACKAGES = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file to read. ``form`` is never ``AUTO``."""

    path: str
    form: InputFormat
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Sources:
    """Everything to read, in order; and what was found to be unreadable on the way."""

    entries: tuple[SourceFile | BadRecord, ...]

    @property
    def total_bytes(self) -> int:
        """Size on disk of all files."""
        return sum(e.size_bytes for e in self.entries if isinstance(e, SourceFile))

    @property
    def files(self) -> int:
        """Files, sound or not."""
        return len(self.entries)


def discover(config: PreprocessConfig) -> Sources:
    """List what ``config`` asks to read.

    Raises:
        UserError: an input does not exist or is neither file nor directory.
    """
    entries: list[SourceFile | BadRecord] = []
    for path in config.inputs:
        entries.extend(_expand(path, config))
    if config.stdlib:
        is_python = config.input_format is InputFormat.PYTHON
        form = InputFormat.PYTHON if is_python else InputFormat.TEXT
        entries.extend(_walk(stdlib_root(), ("*.py",), form, _FOREIGN_PACKAGES))
    return Sources(entries=tuple(entries))


def stdlib_root() -> str:
    """Return the directory of the running Python's own standard library."""
    return sysconfig.get_path("stdlib")


def form_of(path: str, wanted: InputFormat) -> InputFormat:
    """Return how ``path`` becomes documents: ``wanted``, or by its name when that is ``AUTO``."""
    if wanted is not InputFormat.AUTO:
        return wanted
    plain = path.removesuffix(".gz").removesuffix(".zst").lower()
    return InputFormat.JSONL if plain.endswith(_JSONL_SUFFIXES) else InputFormat.TEXT


def _expand(path: str, config: PreprocessConfig) -> Iterator[SourceFile | BadRecord]:
    """Yield the file ``path``, or the files below the directory ``path``."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise UserError(
            f"--input {path}: {error.strerror}; give an existing file or directory"
        ) from error
    if stat.S_ISDIR(status.st_mode):
        yield from _walk(path, config.globs or TREE_GLOBS, config.input_format, frozenset())
    elif stat.S_ISREG(status.st_mode):
        yield _source(path, config.input_format)
    else:
        raise UserError(f"--input {path}: neither a file nor a directory; store it in a file first")


def _walk(
    root: str, globs: tuple[str, ...], wanted: InputFormat, skipped: frozenset[str]
) -> Iterator[SourceFile | BadRecord]:
    """Yield the files below ``root`` that match, sorted by their path."""
    found: list[str] = []
    broken: list[BadRecord] = []

    def note(error: OSError) -> None:
        broken.append(_unreadable(error.filename, error))

    for directory, names, files in os.walk(root, onerror=note):
        names[:] = [n for n in names if not _is_skipped(n, skipped)]
        for name in files:
            path = os.path.join(directory, name)
            if not name.startswith(".") and _matches(os.path.relpath(path, root), globs):
                found.append(path)
    # Sorted as bytes: the order must not depend on the locale or on how os.walk met the names.
    yield from (_source(path, wanted) for path in sorted(found, key=os.fsencode))
    yield from broken


def _is_skipped(name: str, skipped: frozenset[str]) -> bool:
    return name.startswith(".") or name in skipped or name in _SKIPPED_DIRECTORIES


def _matches(relative: str, globs: tuple[str, ...]) -> bool:
    name = os.path.basename(relative)
    return any(fnmatchcase(relative if "/" in glob else name, glob) for glob in globs)


def _source(path: str, wanted: InputFormat) -> SourceFile | BadRecord:
    """Describe one file. Opening a pipe would block, so it is unreadable, like a dangling link."""
    try:
        status = os.stat(path)
    except OSError as error:
        return _unreadable(path, error)
    if not stat.S_ISREG(status.st_mode):
        return BadRecord(path=path, line=0, kind=BadKind.UNREADABLE, detail="not a regular file")
    return SourceFile(path=path, form=form_of(path, wanted), size_bytes=status.st_size)


def _unreadable(path: str, error: OSError) -> BadRecord:
    detail = error.strerror or str(error)
    return BadRecord(path=path, line=0, kind=BadKind.UNREADABLE, detail=detail)
