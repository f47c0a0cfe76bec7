"""Whoever knows no token gets nowhere, and whoever misuses a link loses it; the job goes on."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest
from control_peers import Owner, SmallRules, agent, coordinator, node_hello
from websockets.asyncio.client import ClientConnection, connect, unix_connect
from websockets.exceptions import ConnectionClosed

from resihp_ext.control import frames
from resihp_ext.control import messages as say
from resihp_ext.control.frames import Seal, new_token
from resihp_ext.control.node import NodeControl
from resihp_ext.control.server import CoordinatorServer
from resihp_ext.errors import ResiHPError

pytestmark = pytest.mark.dist

TOKEN = new_token()
HELLO = say.encode(node_hello("b", ranks=(5,)))


class Place:
    """A coordinator with an agent, both of which must survive what a test does."""

    def __init__(self, server: CoordinatorServer, node: NodeControl, rules: SmallRules) -> None:
        self.server, self.node, self.rules = server, node, rules

    def dropped(self, kind: str, times: int = 1) -> None:
        """Waits until this was counted."""
        until_s = time.monotonic() + 10.0
        while self.server.counters.as_dict().get(kind, 0) < times:
            assert time.monotonic() < until_s, self.server.counters.as_dict()
            time.sleep(0.01)

    def lives(self) -> None:
        """The link of the honest agent still works."""
        self.node.exited(0, 0, "still here", 0)
        self.rules.heard(say.Exited, cause="still here")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        rules = SmallRules()
        server = stack.enter_context(coordinator(TOKEN, rules))
        node = stack.enter_context(agent(TOKEN, tmp_path / "a.sock", Owner()))
        node.join(*server.address, node_hello())
        yield Place(server, node, rules)


async def dialled(place: Place) -> ClientConnection:
    host, port = place.server.address
    return await connect(f"ws://{host}:{port}/", proxy=None, compression=None)


async def introduced(
    connection: ClientConnection, role: str = "agent", name: str = "b", token: bytes = TOKEN
) -> Seal:
    """A handshake by hand; the seal of what the client sends."""
    asked = msgspec.msgpack.decode(await connection.recv(), type=frames.Challenge)
    mine = frames.claim(token, asked, role, name)
    await connection.send(msgspec.msgpack.encode(mine))
    await connection.recv()
    return Seal(frames.key_of(token, asked, mine), to_server=True)


async def ended(connection: ClientConnection) -> int:
    """Reads until the server hangs up; its code."""
    try:
        async with asyncio.timeout(10):
            while True:
                await connection.recv()
    except ConnectionClosed as closed:
        return closed.rcvd.code if closed.rcvd else 0


def attack(place: Place, how: Callable[[ClientConnection], Awaitable[None]]) -> int:
    async def run() -> int:
        connection = await dialled(place)
        try:
            await how(connection)
            return await ended(connection)
        except ConnectionClosed as closed:
            return closed.rcvd.code if closed.rcvd else 0

    return asyncio.run(run())


def test_garbage_on_the_port_is_counted(place: Place) -> None:
    garbage = [b"\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\x16\x03\x01" * 500]
    for data in garbage:
        with socket.create_connection(place.server.address) as stranger:
            stranger.settimeout(10)
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            try:
                while stranger.recv(4096):
                    pass
            except ConnectionResetError:
                pass
    place.dropped("no websocket", len(garbage))
    place.lives()


def test_wrong_token_is_refused(place: Place, tmp_path: Path) -> None:
    async def guess(connection: ClientConnection) -> None:
        await introduced(connection, token=new_token())

    assert attack(place, guess) == 1008
    place.dropped("wrong token")
    with (
        agent(new_token(), tmp_path / "b.sock", Owner()) as control,
        pytest.raises(ResiHPError, match="refused: wrong token"),
    ):
        control.join(*place.server.address, node_hello("b"), timeout_s=0.5)
    place.lives()


def test_workers_role_is_none_on_the_network(place: Place) -> None:
    async def guess(connection: ClientConnection) -> None:
        await introduced(connection, role="worker")

    assert attack(place, guess) == 1008
    place.dropped("wrong role")


def test_garbage_instead_of_a_claim(place: Place) -> None:
    async def guess(connection: ClientConnection) -> None:
        await connection.send(b"\x91" * 1000)

    assert attack(place, guess) == 1008
    place.dropped("bad handshake")
    place.lives()


def test_stranger_cannot_send_much(place: Place) -> None:
    async def flood(connection: ClientConnection) -> None:
        await connection.send(b"x" * 2000)

    assert attack(place, flood) == 1009
    place.dropped("handshake")


def test_replayed_frame_ends_the_link(place: Place) -> None:
    async def replay(connection: ClientConnection) -> None:
        seal = await introduced(connection)
        await connection.send(seal.close(HELLO))
        beat = seal.close(say.encode(say.NodeBeat(node="b", step=1, alive=())))
        await connection.send(beat)
        await connection.send(beat)

    assert attack(place, replay) == 1008
    place.dropped("bad tag")
    assert place.rules.wait("lost")[1][0] == "b"
    place.lives()


def test_unauthentic_frame_ends_the_link(place: Place) -> None:
    async def forge(connection: ClientConnection) -> None:
        await introduced(connection)
        await connection.send(Seal(b"k" * 32, to_server=True).close(HELLO))

    assert attack(place, forge) == 1008
    place.dropped("bad tag")


def test_message_outside_the_schema_ends_the_link(place: Place) -> None:
    async def invent(connection: ClientConnection) -> None:
        seal = await introduced(connection)
        await connection.send(seal.close(HELLO))
        await connection.send(seal.close(msgspec.msgpack.encode({"type": "shutdown"})))

    assert attack(place, invent) == 1008
    place.dropped("unknown message")
    place.lives()


def test_message_of_another_role_ends_the_link(place: Place) -> None:
    async def command(connection: ClientConnection) -> None:
        seal = await introduced(connection, role="person", name="command")
        await connection.send(seal.close(HELLO))

    assert attack(place, command) == 1008
    place.dropped("unexpected message")


def test_oversize_frames_end_the_link(place: Place) -> None:
    async def flood(connection: ClientConnection) -> None:
        seal = await introduced(connection)
        await connection.send(seal.close(HELLO))
        await connection.send(b"x" * (17 * 1024 * 1024))

    assert attack(place, flood) == 1009
    place.dropped("oversize")

    async def long_beat(connection: ClientConnection) -> None:
        seal = await introduced(connection, name="c")
        hello = node_hello("c", ranks=(6,))
        await connection.send(seal.close(say.encode(hello)))
        beat = say.NodeBeat(node="c", step=0, alive=tuple(range(100_000)))
        await connection.send(seal.close(say.encode(beat)))

    assert attack(place, long_beat) == 1008
    place.dropped("oversize", 2)
    place.lives()


def test_agent_cannot_take_anothers_name(place: Place) -> None:
    async def lie(connection: ClientConnection) -> None:
        seal = await introduced(connection, name="c")
        await connection.send(seal.close(HELLO))

    attack(place, lie)
    place.dropped("node refused")


def test_worker_cannot_speak_for_another(place: Place, tmp_path: Path) -> None:
    async def lie() -> int:
        connection = await unix_connect(str(tmp_path / "a.sock"), compression=None)
        seal = await introduced(connection, role="worker", name="rank 0")
        hello = say.Hello(rank=0, incarnation=0, pid=os.getpid(), joins=False)
        await connection.send(seal.close(say.encode(hello)))
        await connection.send(seal.close(say.encode(say.Leaving(rank=1, exit_code=0))))
        return await ended(connection)

    assert asyncio.run(lie()) == 1008
    assert place.node.counters.as_dict() == {"wrong rank": 1}
    place.lives()


def test_sockets_of_an_agent_are_its_owners_alone(place: Place, tmp_path: Path) -> None:
    assert (tmp_path / "a.sock").stat().st_mode & 0o777 == 0o600


def named_sockets() -> int:
    """Descriptors of this process that are sockets with a name or a named peer."""
    found = 0
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            with socket.socket(fileno=os.dup(number)) as one:
                peer = "" if one.getsockname() else one.getpeername()
                found += bool(one.getsockname() or peer)
        except OSError:
            continue
    return found


def test_forked_child_holds_no_socket(place: Place) -> None:
    """Neither a port nor a connection: or a killed coordinator would leave both open."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"%d" % named_sockets())
        os._exit(0)
    os.waitpid(child, 0)
    assert named_sockets() >= 4  # two that listen, two ends of a connection
    assert os.read(read, 100) == b"0"
    os.close(read)
    os.close(write)
    place.lives()
