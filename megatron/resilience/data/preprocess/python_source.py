"""Cutting Python source into documents: each top-level function or class, and the code between.

Promise: the documents joined together are the source, character by character; a source that Python
cannot parse is one document.
"""

import ast
import io
import itertools
import warnings
from collections.abc import Iterator

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def split_source(text: str) -> list[tuple[int, str]]:
    """Return (number of its first line, text) of each document of a Python file.

    A definition takes along its decorators, the comments directly above it and the blank lines
    below it.
    """
    # Not str.splitlines: for Python's grammar a form feed or U+2028 does not end a line.
    lines = list(io.StringIO(text, newline=""))
    cuts = [0, *_cuts(text, lines), len(lines)]
    pieces = [
        (start + 1, "".join(lines[start:end]))
        for start, end in itertools.pairwise(cuts)
        if end > start
    ]
    return pieces or [(1, text)]


def _cuts(text: str, lines: list[str]) -> Iterator[int]:
    """Yield the indices of the lines, in ascending order, at which a document begins."""
    floor = 0  # lines above belong to a statement, so no comment in front of a definition
    for node in _statements(text):
        assert node.end_lineno is not None
        if isinstance(node, _DEFINITIONS):
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
            while start > floor and lines[start - 1].lstrip().startswith("#"):
                start -= 1
            if any(line.strip() for line in lines[:start]):
                yield start
            yield _skip_blank(lines, node.end_lineno)
        floor = node.end_lineno


def _statements(text: str) -> list[ast.stmt]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the style of what is only read
            return ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []


def _skip_blank(lines: list[str], index: int) -> int:
    while index < len(lines) and not lines[index].strip():
        index += 1
    return index
