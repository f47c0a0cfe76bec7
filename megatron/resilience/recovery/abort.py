"""Breaks off whatever this process waits for, from another thread.

gloo's own ``abort()`` does not release a wait for a peer that lives, and a store has none. Both
wait for sockets, and a socket that is shut down releases the waits for it (see ``cut.py``).
Listening sockets are left alone: gloo ends the process when one of them fails.

NCCL: all communicators are aborted together, which marks every one before it frees any.
"""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron.resilience.recovery.cut import Cut, open_sockets

logger = logging.getLogger(__name__)


class Abort:
    """Which sockets are for collectives, and whether what waits for them has been broken off."""

    def __init__(self) -> None:
        self._raised = threading.Event()
        self._lock = threading.Lock()
        self._sockets: set[int] = set()
        """By inode: a descriptor's number is used again."""
        self._copies: list[socket.socket] = []
        """Of those that are shut down; they keep the connections open until all have stopped."""

    @property
    def raised(self) -> bool:
        """Whether work is to stop."""
        return self._raised.is_set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Counts the sockets that appear meanwhile among those of collectives."""
        before = set(open_sockets().values())
        try:
            yield
        finally:
            with self._lock:
                self._sockets |= set(open_sockets().values()) - before

    def forget(self) -> None:
        """Before new connections are made: those so far are closed."""
        with self._lock:
            self._sockets.clear()
            for one in self._copies:
                one.close()
            self._copies.clear()
        self._raised.clear()

    def now(self) -> None:
        """Breaks off all waits; does not wait itself. They end within 0.1 s, most of which lets
        messages that are on their way arrive; what begins afterwards fails then, too."""
        self._raised.set()
        self.cut()
        if dist.is_initialized() and "nccl" in dist.get_backend():
            # In a thread of its own: it can hang, and the next step is then to end the process.
            threading.Thread(target=_abort_nccl, name="resihp-abort", daemon=True).start()

    def cut(self) -> None:
        """Shuts down the sockets. Those that are still being made are left to who watches them."""
        with self._lock:
            mine = set(self._sockets)
            self._sockets.clear()
        Cut(mine, self._copies.append).begin()


def _abort_nccl() -> None:
    try:
        dist.distributed_c10d._abort_process_group()
    except RuntimeError as error:
        logger.warning("aborting NCCL failed: %s", error)
