"""Waits for several things at once: processes that end, descriptors to read, a call from a thread.

A dead worker must be reported within milliseconds: its peers hang until they are told. The kernel
says so through a *pidfd*; where it has none (Linux before 5.3) processes are looked at every few
milliseconds instead.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Hashable

GLANCE_S = 0.005
"""Between two looks at processes that have no pidfd."""


class Watch:
    """Things that are waited for, each under a key of the caller's. One thread waits."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._keys: dict[int, Hashable] = {}
        self._own: dict[Hashable, int] = {}
        """Descriptors that this object has opened, by key."""
        self._glanced: dict[Hashable, int] = {}
        """Pids without a pidfd, by key."""
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll.register(self._bell, select.POLLIN)

    def add_process(self, key: Hashable, pid: int) -> None:
        """Waits for a child to end, without reaping it; what ``key`` stood for is forgotten."""
        self.discard(key)
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            self._glanced[key] = pid
            return
        self._own[key] = descriptor
        self.add(key, descriptor)

    def add(self, key: Hashable, descriptor: int) -> None:
        """Waits until a descriptor can be read, or its other side is closed."""
        self._keys[descriptor] = key
        self._poll.register(descriptor, select.POLLIN)

    def discard(self, key: Hashable) -> None:
        """No longer waits for ``key``, if it ever did."""
        self._glanced.pop(key, None)
        for descriptor in [fd for fd, known in self._keys.items() if known == key]:
            self._poll.unregister(descriptor)
            del self._keys[descriptor]
        if (own := self._own.pop(key, None)) is not None:
            os.close(own)

    def ring(self) -> None:
        """Ends the wait of the other thread; from any thread, never blocks."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    def wait(self, timeout_s: float) -> set[Hashable]:
        """Keys of what has happened; empty when the bell rang, or after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            slice_s = min(left_s, GLANCE_S) if self._glanced else left_s
            ready = self._poll.poll(slice_s * 1000)
            found = {self._keys[fd] for fd, _ in ready if fd in self._keys}
            found |= {key for key, pid in self._glanced.items() if _ended(pid)}
            if any(fd == self._bell for fd, _ in ready):
                os.eventfd_read(self._bell)
                return found
            if found or left_s <= 0:
                return found

    def close(self) -> None:
        """Closes what this object has opened."""
        for descriptor in (*self._own.values(), self._bell):
            os.close(descriptor)
        self._own.clear()


def _ended(pid: int) -> bool:
    try:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, pid, how) is not None
    except ChildProcessError:
        return True
