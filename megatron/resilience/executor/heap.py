"""Where the C library puts the large buffers of a layout."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

_M_MMAP_THRESHOLD = -3
"""From glibc's malloc.h."""
_M_ARENA_MAX = -8
_APART_BYTES = 1 << 20
_USUAL_BYTES = 32 << 20
"""Where glibc's own adjustment of the threshold ends, which setting it ends."""


def few_arenas() -> None:
    """Keeps threads of process groups, which come and go with layouts, from having heaps of their
    own: what is free in those never goes back to the system."""
    _set(_M_ARENA_MAX, 2)


@contextmanager
def large_apart() -> Iterator[None]:
    """Gives tensors from 1 MiB on, which are made meanwhile, memory that goes back when they go.

    Among the short-lived tensors of steps, buffers of a layout would leave holes that those of the
    next do not fit: a process would grow with every change.
    """
    _set(_M_MMAP_THRESHOLD, _APART_BYTES)
    try:
        yield
    finally:
        _set(_M_MMAP_THRESHOLD, _USUAL_BYTES)


def _set(parameter: int, value: int) -> None:
    """Does nothing with another C library than glibc, whose heap may not need it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(parameter, value)
