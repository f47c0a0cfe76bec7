"""The agent's link to the coordinator, and the lease that it holds there.

The coordinator answers beats. An agent whose last answered beat was sent longer ago than the lease
must take itself for cut off: the others may already go on without it. Its lease ends before the
coordinator's patience does (``ServerLimits.node_silence_s``), so that at no time two parties train.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from resihp_ext.control.channel import Channel, LinkClosed, open_channel
from resihp_ext.control.counters import Counters
from resihp_ext.control.messages import Lease, Message, NodeHello
from resihp_ext.control.traffic import AGENT
from resihp_ext.errors import ResiHPError

logger = logging.getLogger(__name__)

RETRY_S = 0.25
KEPT_MESSAGES = 10_000
"""While the link is down."""


class Uplink:
    """Belongs to one event loop; connects again when the connection is lost."""

    def __init__(
        self,
        token: bytes,
        counters: Counters,
        *,
        lease_s: float,
        on_message: Callable[[Message], None],
        on_cut_off: Callable[[str], None],
    ) -> None:
        self._token, self._counters = token, counters
        self._lease_s = lease_s
        self._on_message, self._on_cut_off = on_message, on_cut_off
        self._where = ("", 0)
        self._hello: NodeHello | None = None
        self._channel: Channel | None = None
        self._kept: deque[bytes] = deque(maxlen=KEPT_MESSAGES)
        self._leased_s = 0.0
        self._closing = False

    @property
    def joined(self) -> bool:
        """Whether it was ever connected."""
        return self._hello is not None

    @property
    def unanswered_s(self) -> float | None:
        """Since the last beat that was answered; None before there was a connection."""
        return time.monotonic() - self._leased_s if self.joined else None

    def post(self, payload: bytes) -> None:
        """Sends a packed message, now or once the link is up."""
        if self._channel is None:
            self._kept.append(payload)
        else:
            self._channel.post(payload)

    def beat(self, message: Message) -> None:
        """Sends what is out of date a moment later: not kept while the link is down."""
        if self._channel is not None:
            self._channel.send(message)

    def offer(self, payload: bytes) -> None:
        """The same for a packed message, and nothing to a coordinator that is behind."""
        if self._channel is not None:
            self._channel.offer(payload)

    def greet(self, hello: NodeHello) -> bool:
        """Says who is there (again); False when there is no connection yet."""
        if self._channel is None:
            return False
        self._hello = hello
        self._channel.send(hello)
        return True

    async def connect(self, where: tuple[str, int], hello: NodeHello, timeout_s: float) -> None:
        """Connects for the first time.

        Raises:
            ResiHPError: the coordinator could not be reached in time.
        """
        self._where = where
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                await self._open(hello)
            except ResiHPError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(RETRY_S)
            else:
                self._hello = hello
                return

    async def _open(self, hello: NodeHello) -> None:
        channel = await open_channel(self._where, self._token, AGENT, hello.node, self._counters)
        self._leased_s = time.monotonic()
        self._channel = channel
        channel.send(hello)
        while self._kept:
            channel.post(self._kept.popleft())

    async def serve(self) -> None:
        """Receives for ever, connecting anew where needed; the lease goes on meanwhile."""
        while True:
            if self._channel is None:
                await self._reopen()
                continue
            try:
                message, _ = await self._channel.receive()
            except LinkClosed as closed:
                if self._closing:
                    return
                logger.warning("link to the coordinator: %s", closed)
                self._channel = None
                continue
            if isinstance(message, Lease):
                self._leased_s = max(self._leased_s, message.sent_s)
            else:
                self._on_message(message)

    async def _reopen(self) -> None:
        assert self._hello is not None
        leased_s = self._leased_s
        try:
            await self._open(self._hello)
        except ResiHPError:
            await asyncio.sleep(RETRY_S)
        finally:
            # Only an answer to a beat extends the lease, not that somebody listens.
            self._leased_s = leased_s

    def check_lease(self) -> None:
        """Calls ``on_cut_off`` when the lease has run out."""
        late_s = self.unanswered_s
        if late_s is not None and late_s > self._lease_s:
            host, port = self._where
            self._on_cut_off(
                f"the coordinator at {host}:{port} has not answered for {late_s:.1f} s"
            )

    async def close(self) -> None:
        """Says goodbye."""
        self._closing = True
        if self._channel is not None:
            await self._channel.close()
