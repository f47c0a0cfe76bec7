"""A forked child holds no connection of its parent.

A data loader's worker that outlives its rank would keep the rank's socket open, and nobody would
notice the death. In a child every socket is replaced by ``/dev/null`` under the same number: no
word goes to the peer, and whatever closes the number later closes nothing else.
"""

from __future__ import annotations

import os
from typing import Protocol
from weakref import WeakSet


class HasSockets(Protocol):
    """Whoever has sockets open."""

    def filenos(self) -> list[int]: ...


# What is called after a fork cannot be taken back, so it needs a list that lives as long.
_owners: WeakSet[HasSockets] = WeakSet()


def close_in_children(owner: HasSockets) -> None:
    """The sockets that ``owner`` has at the time of a fork are closed in the child."""
    _owners.add(owner)


def _after_fork() -> None:
    numbers = {number for owner in _owners for number in owner.filenos() if number >= 0}
    if not numbers:
        return
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in numbers:
        os.dup2(null, number, inheritable=False)
    os.close(null)
    _owners.clear()


os.register_at_fork(after_in_child=_after_fork)
