"""Shuts down connections without tearing messages that their two ends could still finish.

When a connection ends in the middle of a message, gloo's error reaches all who wait for it but the
two that are at this very message: they wait on until the group's timeout. So a connection is shut
down only when it is idle. Who sends knows that exactly, for gloo asks the system when it can go on;
who receives goes by whether anything has come for a moment. What a dead or stopped peer leaves
unfinished is torn nevertheless.

Only reading is shut down, and a copy of the descriptor keeps the connection open: gloo also forgets
a send that was announced and whose first write then fails. So nobody's writes fail before its reads
do.
"""

from __future__ import annotations

import fcntl
import os
import select
import socket
import stat
import struct
import termios
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

QUIET_S = 0.03
"""Without a byte, after which no message is taken to be on its way."""
LOOK_S = 0.01
LIMIT_S = 1.0
"""After which messages are torn."""

_OPEN_FILES, _INFO = Path("/proc/self/fd"), Path("/proc/self/fdinfo")
_RECEIVED = struct.Struct("=128xQ")
"""Of Linux's ``tcp_info``: how many bytes have come in all."""


def open_sockets() -> dict[int, int]:
    """Inode of every socket of this process, by descriptor."""
    found = {}
    for name in os.listdir(_OPEN_FILES):
        with suppress(OSError):
            state = os.stat(_OPEN_FILES / name)
            if stat.S_ISSOCK(state.st_mode):
                found[int(name)] = state.st_ino
    return found


class Cut:
    """Ends some connections; a thread of its own waits for those that are busy."""

    def __init__(self, inodes: Iterable[int], keep: Callable[[socket.socket], None]) -> None:
        """Prepares it.

        Args:
            inodes: Of the sockets: a descriptor's number is used again.
            keep: Takes the copies.
        """
        self._inodes, self._keep = frozenset(inodes), keep
        self._seen: dict[int, tuple[int, float]] = {}
        """How much had come by the last look, and since when it is no more."""
        self._done: set[int] = set()
        self._begun_s = time.monotonic()

    def begin(self) -> None:
        """Begins, and is not waited for."""
        if not self.look():
            threading.Thread(target=self._finish, name="resihp-cut", daemon=True).start()

    def _finish(self) -> None:
        while not self.look():
            time.sleep(LOOK_S)

    def look(self) -> bool:
        """Ends what can be ended now; whether that was all."""
        epolls = _epolls()
        for descriptor, inode in open_sockets().items():
            if inode not in self._inodes or inode in self._done:
                continue
            # A copy of the descriptor: closing it leaves gloo's own open.
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    self._done.add(inode)
                else:
                    self._end(one, inode, sends=descriptor in _sending(epolls))
        return not (self._inodes - self._done) & set(open_sockets().values())

    def _end(self, one: socket.socket, inode: int, *, sends: bool) -> None:
        now_s = time.monotonic()
        came, since_s = self._seen.get(inode, (-1, now_s))
        found, unread = _came(one)
        if sends or unread or found != came:
            since_s = now_s
        self._seen[inode] = found, since_s
        if now_s - since_s >= QUIET_S or now_s - self._begun_s >= LIMIT_S:
            self._done.add(inode)
            self._keep(one.dup())
            one.shutdown(socket.SHUT_RD)


def _came(one: socket.socket) -> tuple[int, int]:
    """How many bytes have come in all, and how many of them nobody has read."""
    unread = struct.unpack("i", fcntl.ioctl(one, termios.FIONREAD, bytes(4)))[0]
    try:
        told = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
    except OSError:  # a Unix socket has no such counter
        return 0, unread
    return _RECEIVED.unpack(told)[0], unread


def _epolls() -> list[str]:
    found = []
    for name in os.listdir(_OPEN_FILES):
        with suppress(OSError):
            if os.readlink(_OPEN_FILES / name) == "anon_inode:[eventpoll]":
                found.append(name)
    return found


def _sending(epolls: Iterable[str]) -> set[int]:
    """Descriptors with an unfinished message: gloo then wants to hear when it can go on."""
    found = set()
    for name in epolls:
        with suppress(OSError):
            for line in (_INFO / name).read_text().splitlines():
                words = line.split()
                if words[0] == "tfd:" and int(words[3], 16) & select.EPOLLOUT:
                    found.add(int(words[1]))
    return found
