"""A worker's link to the agent of its node.

It runs in a thread of its own, so that a worker that hangs in a collective still tells how far it
is, and still hears that it must stop waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from resihp_ext.control.channel import Channel, LinkClosed, open_channel
from resihp_ext.control.counters import Counters
from resihp_ext.control.loop_thread import LoopThread
from resihp_ext.control.messages import Message, Progress
from resihp_ext.control.traffic import SMALL_BYTES, WORKER, packed

logger = logging.getLogger(__name__)

CONNECT_S = 60.0
CLOSE_S = 3.0


class WorkerLink:
    """Messages of one worker to its agent, and back.

    ``on_message`` and ``progress`` are called in the link's thread. ``on_lost`` is called there,
    once, when the agent is gone or the link has failed: a worker without an agent must end itself.
    Progress is sent from the first :meth:`send` on, which is the worker's ``Hello``.
    """

    def __init__(
        self,
        path: str,
        token: bytes,
        rank: int,
        *,
        on_message: Callable[[Message], None],
        progress: Callable[[], Progress],
        on_lost: Callable[[], None] = lambda: None,
        interval_s: float = 0.25,
    ) -> None:
        self.lost = False
        """Whether the agent is gone."""
        self._path, self._token, self._rank = path, token, rank
        self._on_message, self._progress, self._on_lost = on_message, progress, on_lost
        self._interval_s = interval_s
        self._channel: Channel | None = None
        self._closing = False
        self._greeted = False
        self._thread = LoopThread("control link", self._run, self._failed)

    def start(self) -> None:
        """Connects, and returns once that is done.

        Raises:
            ResiHPError: there is no agent of this job at the path.
        """
        self._thread.start(CONNECT_S)

    def send(self, message: Message) -> None:
        """Sends without blocking, in order, from any thread; to a lost agent: nowhere.

        Raises:
            ResiHPError: the message is too large.
        """
        self._thread.call(self._post, packed(message))

    def offer(self, message: Message) -> None:
        """The same for news that is soon out of date: an agent that does not read needs no more.

        Raises:
            ResiHPError: the message is too large.
        """
        self._thread.call(self._offer, packed(message))

    def close(self) -> None:
        """Ends the link; what was sent before is delivered.

        Raises:
            Exception: what has gone wrong in the link's thread, if anything.
        """
        self._closing = True
        self._thread.stop(CLOSE_S)

    def _post(self, payload: bytes) -> None:
        if self._channel is not None:
            self._greeted = True
            self._channel.post(payload)

    def _offer(self, payload: bytes) -> None:
        if self._channel is not None:
            self._channel.offer(payload)

    async def _run(self) -> None:
        name = f"rank {self._rank}"
        self._channel = await open_channel(self._path, self._token, WORKER, name, Counters(logger))
        self._thread.ready()
        self._thread.spawn(self._beats(self._channel))
        try:
            while True:
                message, _ = await self._channel.receive()
                self._on_message(message)
        except LinkClosed:
            if not self._closing:
                self._lose()
        finally:
            await self._channel.close()

    async def _beats(self, channel: Channel) -> None:
        while True:
            # An agent that does not read needs no more news.
            if self._greeted and channel.backlog_bytes < SMALL_BYTES:
                channel.send(self._progress())
            await asyncio.sleep(self._interval_s)

    def _failed(self, _error: BaseException) -> None:
        self._lose()

    def _lose(self) -> None:
        if not self.lost:
            self.lost = True
            self._on_lost()
