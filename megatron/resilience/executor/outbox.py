"""Messages that a slow link holds back: sent later, in the order in which they are due.

A slow link is made on the sender's side, since clocks of two nodes differ: a message leaves when
the healthy link delivers it as late as the slow one would. It is not copied, and nobody waits for
it but its receiver, and its sender at the end of the pass.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from resihp_ext.faults.lasting import Hold

Holds = Callable[[int], Hold | None]
"""Gives by how much messages to a global rank are held back now; None: not at all."""

_LOOK_S = 0.1
"""Between two looks whether the pass is to be broken off, while messages wait."""
_END_S = 5.0


class Outbox:
    """The messages of one pass of one rank; the backend must tell messages apart by tags (gloo).

    A thread hands them over to torch. It is started with the first, and ends with the pass.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[float, int, torch.Tensor, int, int]] = []
        """When due, number, tensor, torch's number of the receiver, tag."""
        self._sent: list[tuple[Any, torch.Tensor]] = []
        self._free_s: dict[int, float] = defaultdict(float)
        """By receiver: when its link has room for the next message."""
        self._count = 0
        self._error: BaseException | None = None
        self._closed = False
        # Of now: a pass that was broken off must not speak into the next group.
        self._group: Any = dist.group.WORLD
        self._thread = threading.Thread(target=self._run, name="held messages", daemon=True)
        self._thread.start()

    def put(self, rows: torch.Tensor, number: int, tag: int, hold: Hold) -> None:
        """Sends a tensor later; does not wait. The tensor must not change until then.

        Args:
            number: torch's, of the receiver.
        """
        size = rows.numel() * rows.element_size()
        with self._changed:
            begin_s = max(time.monotonic(), self._free_s[number])
            self._free_s[number] = begin_s + size * hold.busy_s_per_byte
            due_s = begin_s + hold.delay_s + size * hold.extra_s_per_byte
            heapq.heappush(self._waiting, (due_s, self._count, rows, number, tag))
            self._count += 1
            self._changed.notify()

    def finish(self, look: Callable[[], object]) -> list[tuple[Any, torch.Tensor]]:
        """Waits until all have been handed over; gives what is under way, to be waited for.

        Args:
            look: Called from time to time; may raise.

        Raises:
            RuntimeError: of torch: a connection has ended.
        """
        with self._changed:
            while self._waiting and self._error is None:
                if not self._changed.wait(_LOOK_S):
                    look()
            if self._error is not None:
                raise self._error
            sent, self._sent = self._sent, []
            return sent

    def close(self) -> None:
        """Forgets what has not been sent."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        self._thread.join(_END_S)

    def _run(self) -> None:
        with self._changed:
            while not self._closed and self._error is None:
                rest_s = self._waiting[0][0] - time.monotonic() if self._waiting else None
                if rest_s is None or rest_s > 0:
                    self._changed.wait(rest_s)
                    continue
                _, _, rows, number, tag = heapq.heappop(self._waiting)
                try:
                    self._sent.append((self._group.send([rows], number, tag), rows))
                except RuntimeError as error:
                    self._error = error  # raised in the main thread
                self._changed.notify_all()
