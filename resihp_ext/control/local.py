"""The agent's server for the workers of its node, on a Unix socket."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from websockets.asyncio.server import Server, ServerConnection, unix_serve

from resihp_ext.control.channel import (
    HANDSHAKE_S,
    Channel,
    LinkClosed,
    accept,
    server_options,
)
from resihp_ext.control.counters import Counters
from resihp_ext.control.forks import close_in_children
from resihp_ext.control.messages import Hello, Leaving, Message
from resihp_ext.control.traffic import WORKER


@dataclass(slots=True, eq=False)
class LocalWorker:
    """A worker that has connected."""

    hello: Hello
    channel: Channel
    left: bool = False
    """Whether it has said that it leaves."""


class LocalServer:
    """Workers of one node by rank; belongs to one event loop.

    ``on_message`` gets what a worker says and the bytes of it, its ``Hello`` first; ``on_closed``
    is called at once when its connection ends, whatever the reason.
    """

    def __init__(
        self,
        path: Path,
        token: bytes,
        counters: Counters,
        *,
        on_message: Callable[[LocalWorker, Message, bytes], None],
        on_closed: Callable[[LocalWorker], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.path = path
        self.workers: dict[int, LocalWorker] = {}
        self._token, self._counters = token, counters
        self._on_message, self._on_closed, self._on_error = on_message, on_closed, on_error
        self._server: Server | None = None
        self._closed: dict[int, asyncio.Event] = {}
        self._is_over = False

    async def open(self) -> None:
        """Listens.

        Raises:
            OSError: the socket cannot be made.
        """
        self.path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            self._server = await unix_serve(
                self._serve, str(self.path), **server_options(self._counters)
            )
        finally:
            os.umask(mask)
        close_in_children(self)

    def filenos(self) -> list[int]:
        """Listening sockets, for ``forks``."""
        return [one.fileno() for one in self._server.sockets] if self._server else []

    async def close(self) -> None:
        """Ends all connections; those of workers that run say that the agent is gone."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self.path.unlink(missing_ok=True)

    def post(self, rank: int, payload: bytes) -> None:
        """Sends a worker a packed message; to a worker that is gone: nowhere."""
        worker = self.workers.get(rank)
        if worker is not None:
            worker.channel.post(payload)

    def abort(self) -> None:
        """Ends all connections at once, and takes no more."""
        self._is_over = True
        for worker in list(self.workers.values()):
            worker.channel.abort()

    async def drained(self, rank: int, timeout_s: float) -> None:
        """Waits until all has been read that a worker's process said before it ended."""
        worker = self.workers.get(rank)
        if worker is None:
            return
        closed = self._closed.setdefault(rank, asyncio.Event())
        try:
            async with asyncio.timeout(timeout_s):
                await closed.wait()
        except TimeoutError:
            # Somebody else holds its socket open: a child that was not forked by Python.
            worker.channel.abort()

    async def _serve(self, connection: ServerConnection) -> None:
        try:
            if self._is_over:
                return
            channel = await accept(connection, self._token, {WORKER}, self._counters)
            if channel is not None:
                await self._talk(channel)
        except LinkClosed:
            pass
        except Exception as error:  # noqa: BLE001 - the library would log it and go on
            self._on_error(error)

    async def _talk(self, channel: Channel) -> None:
        worker = await self._greeted(channel)
        if worker is None:
            return
        try:
            while True:
                message, payload = await channel.receive()
                if getattr(message, "rank", None) != worker.hello.rank or isinstance(
                    message, Hello
                ):
                    self._counters.count("wrong rank", f"{channel.name}: {type(message).__name__}")
                    await channel.close(1008, "wrong rank")
                    return
                worker.left |= isinstance(message, Leaving)
                self._on_message(worker, message, payload)
        finally:
            rank = worker.hello.rank
            del self.workers[rank]
            if (closed := self._closed.pop(rank, None)) is not None:
                closed.set()
            self._on_closed(worker)

    async def _greeted(self, channel: Channel) -> LocalWorker | None:
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                hello, payload = await channel.receive()
        except TimeoutError:
            self._counters.count("handshake", f"{channel.name} says nothing")
            channel.abort()
            return None
        if self._is_over:
            channel.abort()
            return None
        if not isinstance(hello, Hello) or hello.rank in self.workers:
            self._counters.count("wrong rank", f"{channel.name}: no Hello, or a second one")
            await channel.close(1008, "wrong rank")
            return None
        worker = LocalWorker(hello, channel)
        self.workers[hello.rank] = worker
        self._on_message(worker, hello, payload)
        return worker
