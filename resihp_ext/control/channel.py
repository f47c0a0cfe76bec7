"""One authenticated connection that carries control messages.

WebSocket gives frames and limits of their size; ``frames`` gives authenticity; ``messages`` the
schema. What is wrong in any of these is counted, and the connection dropped: nothing that a
stranger sends becomes an exception elsewhere than in the reader of that connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.asyncio.connection import Connection, broadcast
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed, WebSocketException

from resihp_ext.control import frames
from resihp_ext.control import messages as say
from resihp_ext.control.counters import Counters
from resihp_ext.control.forks import close_in_children
from resihp_ext.control.messages import Message
from resihp_ext.control.traffic import (
    ENVELOPE_BYTES,
    LARGE,
    LARGE_BYTES,
    NEWS_BYTES,
    SMALL_BYTES,
    TO_CLIENT,
    TO_SERVER,
    packed,
)
from resihp_ext.errors import ResiHPError

STRANGER_BYTES = 1024
"""Limit of a record before the peer has proved who it is."""
BACKLOG_BYTES = 64 * 1024 * 1024
"""A peer that lets this much pile up is dropped."""
HANDSHAKE_S = 15.0
"""Generous: all nodes of a job come at the same moment, and cores may be busy."""
CLOSE_S = 1.0

POLICY_VIOLATION, TOO_BIG = 1008, 1009

OPTIONS: dict[str, Any] = {
    "compression": None,
    "ping_interval": None,
    "open_timeout": HANDSHAKE_S,
    "close_timeout": CLOSE_S,
    "max_size": STRANGER_BYTES,
}
"""Of every connection, for both sides."""


class _Guarded(Connection):
    """Is closed in forked children, from its first moment on."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        close_in_children(self)

    def filenos(self) -> list[int]:
        """The socket, for ``forks``."""
        found = self.transport.get_extra_info("socket")
        return [] if found is None else [found.fileno()]


class _GuardedClient(_Guarded, ClientConnection):
    """What a client connects with."""


# A proxy from the environment has no business between the nodes of a job.
CLIENT_OPTIONS: dict[str, Any] = {
    **OPTIONS,
    "proxy": None,
    "create_connection": _GuardedClient,
}


class LinkClosed(Exception):  # noqa: N818 - no error: every connection ends some day
    """The connection is over; says why."""


class RefusedError(ResiHPError):
    """Who listens there does not take this client for one of the job, or is none itself."""


class Channel:
    """An open connection; used in the thread of its event loop only."""

    def __init__(
        self,
        connection: Connection,
        key: bytes,
        role: str,
        name: str,
        counters: Counters,
        *,
        is_server: bool,
    ) -> None:
        self.role = role
        """Of the client."""
        self.name = name
        self._connection = connection
        self._mine = frames.Seal(key, to_server=not is_server)
        self._theirs = frames.Seal(key, to_server=is_server)
        self._taken = (TO_SERVER if is_server else TO_CLIENT)[role]
        self._counters = counters
        # From here on the peer is one of us.
        limit = LARGE_BYTES + ENVELOPE_BYTES + frames.TAG_BYTES
        connection.protocol.max_message_size = limit

    @property
    def backlog_bytes(self) -> int:
        """What the peer has not taken yet."""
        return self._connection.transport.get_write_buffer_size()

    def post(self, payload: bytes) -> None:
        """Sends a packed message without waiting; in order; to a closed connection: nowhere."""
        if self.backlog_bytes > BACKLOG_BYTES:
            self._counters.count("backlog", f"{self.name} does not read")
            self.abort()
            return
        broadcast([self._connection], self._mine.close(payload))

    def offer(self, payload: bytes) -> None:
        """Posts news that is soon out of date, unless the peer is behind: then it needs no more."""
        if self.backlog_bytes < NEWS_BYTES:
            self.post(payload)

    def send(self, message: Message) -> None:
        """Packs and posts."""
        self.post(packed(message))

    async def receive(self) -> tuple[Message, bytes]:
        """The next message, and its bytes as they came.

        Raises:
            LinkClosed: there is none, or it was none of this connection.
        """
        try:
            payload = self._theirs.open(await self._connection.recv(decode=False))
            message = self._known(payload)
        except ConnectionClosed as closed:
            if closed.sent is not None and closed.sent.code == TOO_BIG:
                self._counters.count("oversize", self.name)
            raise LinkClosed(_reason(closed)) from None
        except frames.FrameError as error:
            self._counters.count(error.kind, f"{self.name}: {error}")
            await self.close(POLICY_VIOLATION, error.kind)
            raise LinkClosed(error.kind) from None
        return message, payload

    def _known(self, payload: bytes) -> Message:
        try:
            message = say.decode(payload)
        except msgspec.MsgspecError as error:
            raise frames.FrameError("unknown message", str(error)) from None
        if not isinstance(message, self._taken):
            kind = type(message).__name__
            raise frames.FrameError("unexpected message", f"{kind} on a link of a {self.role}")
        if len(payload) > SMALL_BYTES and not isinstance(message, LARGE):
            raise frames.FrameError("oversize", f"{type(message).__name__}, {len(payload)} bytes")
        return message

    async def close(self, code: int = 1000, reason: str = "") -> None:
        """Says goodbye, for a second at most."""
        await self._connection.close(code, reason)

    def abort(self) -> None:
        """Closes at once; what was not sent is lost."""
        self._connection.transport.abort()


def _reason(closed: ConnectionClosed) -> str:
    if closed.rcvd is not None and closed.rcvd.reason:
        return closed.rcvd.reason
    return "closed" if closed.rcvd is not None else "connection lost"


async def accept(
    connection: Connection, token: bytes, roles: Collection[str], counters: Counters
) -> Channel | None:
    """The server's side of the handshake; None when the client did not prove itself."""
    try:
        async with asyncio.timeout(HANDSHAKE_S):
            asked = frames.challenge()
            await connection.send(msgspec.msgpack.encode(asked))
            found = _record(await connection.recv(decode=False), frames.Claim)
            frames.check_claim(token, asked, found)
            if found.role not in roles:
                raise frames.FrameError("wrong role", found.role)
            await connection.send(msgspec.msgpack.encode(frames.welcome(token, asked, found)))
    except frames.FrameError as error:
        counters.count(error.kind, str(error))
        await connection.close(POLICY_VIOLATION, error.kind)
        return None
    except (TimeoutError, ConnectionClosed) as error:
        counters.count("handshake", repr(error))
        connection.transport.abort()
        return None
    key = frames.key_of(token, asked, found)
    return Channel(connection, key, found.role, found.name, counters, is_server=True)


def _record[Record](raw: bytes, kind: type[Record]) -> Record:
    try:
        return msgspec.msgpack.decode(raw, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise frames.FrameError("bad handshake", str(error)) from None


async def open_channel(
    where: str | tuple[str, int], token: bytes, role: str, name: str, counters: Counters
) -> Channel:
    """Connects to a Unix socket (a path) or over TCP (address and port).

    Raises:
        RefusedError: nobody who knows the token is there.
        ResiHPError: nobody is there.
    """
    try:
        if isinstance(where, str):
            connection = await unix_connect(where, **CLIENT_OPTIONS)
        else:
            host, port = where
            connection = await connect(
                "ws://localhost/",
                host=host,
                port=port,
                family=socket.AF_UNSPEC,
                **CLIENT_OPTIONS,
            )
    except (OSError, TimeoutError, WebSocketException) as error:
        raise ResiHPError(f"control link to {_named(where)}: {error}") from None
    try:
        return await _introduce(connection, token, role, name, counters)
    except (frames.FrameError, TimeoutError, ConnectionClosed) as error:
        connection.transport.abort()
        why = _reason(error) if isinstance(error, ConnectionClosed) else str(error) or "no answer"
        raise RefusedError(f"control link to {_named(where)} was refused: {why}") from None


async def _introduce(
    connection: Connection, token: bytes, role: str, name: str, counters: Counters
) -> Channel:
    async with asyncio.timeout(HANDSHAKE_S):
        asked = _record(await connection.recv(decode=False), frames.Challenge)
        if asked.version != frames.VERSION:
            there, here = asked.version, frames.VERSION
            raise frames.FrameError("version", f"it speaks version {there}, this is {here}")
        mine = frames.claim(token, asked, role, name)
        await connection.send(msgspec.msgpack.encode(mine))
        found = _record(await connection.recv(decode=False), frames.Welcome)
        frames.check_welcome(token, asked, mine, found)
    key = frames.key_of(token, asked, mine)
    return Channel(connection, key, role, name, counters, is_server=False)


def _named(where: str | tuple[str, int]) -> str:
    return where if isinstance(where, str) else f"{where[0]}:{where[1]}"


def server_options(counters: Counters) -> dict[str, Any]:
    """Options of a server; what does not even speak its protocol is counted."""

    def lost_before_it_was_open(connection: ServerConnection) -> None:
        response = connection.response
        if response is None or response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            counters.count("no websocket", repr(connection.protocol.handshake_exc))

    class Counted(_Guarded, ServerConnection):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            lost_before_it_was_open(self)

    quiet = logging.Logger("websockets", logging.WARNING)
    quiet.addHandler(_Count(counters))
    return {**OPTIONS, "logger": quiet, "create_connection": Counted}


class _Count(logging.Handler):
    """What the WebSocket library complains about becomes a count."""

    def __init__(self, counters: Counters) -> None:
        super().__init__(logging.WARNING)
        self._counters = counters

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._counters.count("websocket", repr(error) if error else record.getMessage())
