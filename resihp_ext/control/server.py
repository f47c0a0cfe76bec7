"""The coordinator: carries what nodes say to the rules of membership, and out what these decide.

Runs in one daemon thread, outside of all training processes. Traffic grows with nodes, not with
ranks: agents sum up what their workers do, and get one message for all of them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from websockets.asyncio.server import Server, ServerConnection, serve

from resihp_ext.control import messages as say
from resihp_ext.control.actions import (
    Action,
    Answer,
    End,
    NeedPlan,
    Prepare,
    Record,
    Say,
    ToNode,
    ToRank,
)
from resihp_ext.control.channel import (
    HANDSHAKE_S,
    Channel,
    LinkClosed,
    accept,
    server_options,
)
from resihp_ext.control.counters import Counters
from resihp_ext.control.forks import close_in_children
from resihp_ext.control.loop_thread import LoopThread
from resihp_ext.control.messages import Message
from resihp_ext.control.tally import Pace
from resihp_ext.control.traffic import AGENT, PERSON, packed
from resihp_ext.errors import EXIT_FAILURE, EXIT_REQUEUE, UserError

logger = logging.getLogger(__name__)

START_S = 10.0
CLOSE_S = 5.0
BACKLOG = 4096
DESCRIPTORS = 16384
LATE_S = 3.0


class Rules(Protocol):
    """What the server needs of ``membership.Membership``."""

    def node_joined(self, hello: say.NodeHello) -> list[Action]: ...
    def node_lost(self, node: str, cause: str, now_s: float) -> list[Action]: ...
    def handle(self, message: Message, node: str, now_s: float) -> list[Action]: ...
    def planned(self, request: str, answer: Answer) -> list[Action]: ...
    def stuck(self, cause: str) -> list[Action]: ...
    def tick(self, now_s: float) -> list[Action]: ...
    def drain(self, node: str) -> list[Action]: ...
    def readmit(self, node: str) -> list[Action]: ...
    def status(self) -> dict[str, Any]: ...


Planner = Callable[[NeedPlan], "Future[Answer]"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLimits:
    """Times of the coordinator, in seconds."""

    node_silence_s: float = 15.0
    """Without a beat, after which a node is lost; longer than ``NodeLimits.lease_s``."""
    lease_every_s: float = 2.0
    """Between two answers to beats of a node."""
    plan_s: float = 60.0
    """For one plan."""
    tick_s: float = 0.5


@dataclass(slots=True, eq=False)
class _Node:
    channel: Channel
    heard_s: float
    leased_s: float
    beat: say.NodeBeat | None = None


class CoordinatorServer:
    """TCP server of one job.

    ``planner`` is called in the server's thread and must return at once (a pool's ``submit``); its
    processes must not be forked from this one. ``prepare`` hears which questions may come next.
    ``on_end`` is called in the server's thread when the job is over or the server has failed;
    ``record`` there with what is for ``events.jsonl``.
    """

    def __init__(
        self,
        *,
        token: bytes,
        host: str,
        port: int = 0,
        membership: Rules,
        planner: Planner,
        prepare: Callable[[NeedPlan], None] = lambda _need: None,
        on_end: Callable[[int, str], None] = lambda _code, _cause: None,
        record: Callable[[Record], None] = lambda _event: None,
        limits: ServerLimits | None = None,
    ) -> None:
        if host in ("", "0.0.0.0", "::", "*"):
            raise UserError(f"the coordinator needs the address of one interface, not {host!r}")
        self.limits = limits or ServerLimits()
        self.counters = Counters(logger)
        self.address = (host, port)
        """Where it listens; the port is known once it has started."""
        self._token, self._membership = token, membership
        self._planner, self._prepare, self._on_end = planner, prepare, on_end
        self._record = record
        self._nodes: dict[str, _Node] = {}
        self._lost: set[str] = set()
        self._node_of: dict[int, str] = {}
        self._server: Server | None = None
        self._ticked_s = 0.0
        self._pace = Pace()
        self._thread = LoopThread("coordinator", self._run, self._failed)

    def start(self) -> tuple[str, int]:
        """Listens; returns address and port.

        Raises:
            OSError: it cannot listen there.
            ResiHPError: the thread did not start in time.
        """
        self._thread.start(START_S)
        return self.address

    def close(self) -> None:
        """Ends all connections and the thread.

        Raises:
            Exception: what has gone wrong in the thread, if anything.
        """
        self._thread.stop(CLOSE_S)

    def status(self, timeout_s: float) -> dict[str, Any]:
        """What ``resihp status`` is told; from any other thread.

        Raises:
            ResiHPError: the thread has ended.
            TimeoutError: it did not answer in time.
        """
        return self._thread.ask(self._status, timeout_s)

    def filenos(self) -> list[int]:
        """Listening sockets, for ``forks``."""
        return [one.fileno() for one in self._server.sockets] if self._server else []

    async def _run(self) -> None:
        raise_descriptors()
        host, port = self.address
        self._server = await serve(
            self._serve,
            host,
            port,
            backlog=BACKLOG,
            **server_options(self.counters),
        )
        close_in_children(self)
        self.address = (host, self._server.sockets[0].getsockname()[1])
        self._ticked_s = time.monotonic()
        self._thread.ready()
        try:
            while True:
                await asyncio.sleep(self.limits.tick_s)
                self._tick(time.monotonic())
        finally:
            if self._thread.error is not None:
                self._say_failed(self._thread.error)
            self._server.close()
            await self._server.wait_closed()

    def _say_failed(self, error: BaseException) -> None:
        end = say.EndNode(exit_code=EXIT_FAILURE, cause=_failure(error))
        for node in self._nodes.values():
            node.channel.send(end)

    def _failed(self, error: BaseException) -> None:
        self._on_end(EXIT_FAILURE, _failure(error))

    # Connections

    async def _serve(self, connection: ServerConnection) -> None:
        try:
            channel = await accept(connection, self._token, {AGENT, PERSON}, self.counters)
            if channel is None:
                return
            async with asyncio.timeout(HANDSHAKE_S):
                message, _ = await channel.receive()
            if isinstance(message, say.NodeHello):
                await self._talk(channel, message)
            elif isinstance(message, say.Ask):
                channel.send(self._answer(message))
                await channel.close()
        except LinkClosed:
            pass
        except TimeoutError:
            self.counters.count("handshake", "says nothing")
        except Exception as error:  # noqa: BLE001 - the library would log it and go on
            self._say_failed(error)  # while this connection is still open
            self._thread.fail(error)

    async def _talk(self, channel: Channel, hello: say.NodeHello) -> None:
        name = hello.node
        refusal = self._refusal(channel, hello)
        if refusal:
            self.counters.count("node refused", refusal)
            channel.send(say.EndNode(exit_code=EXIT_REQUEUE, cause=refusal))
            await channel.close()
            return
        now_s = time.monotonic()
        self._nodes[name] = node = _Node(channel, now_s, 0.0)
        self._join(hello)
        try:
            while True:
                message, _ = await channel.receive()
                self._heard(name, node, message)
        except LinkClosed as closed:
            if self._nodes.get(name) is node:
                self._lose(name, f"its agent: {closed}")

    def _refusal(self, channel: Channel, hello: say.NodeHello) -> str:
        name = hello.node
        if channel.name != name:
            return f"an agent called {channel.name} says that it is {name}"
        if name in self._nodes:
            return f"a node called {name} is connected already"
        if name in self._lost and hello.ranks:
            return f"the job goes on without node {name}, which was lost"
        return ""

    def _join(self, hello: say.NodeHello) -> None:
        self._lost.discard(hello.node)
        self._node_of.update(dict.fromkeys(hello.ranks, hello.node))
        self._act(self._membership.node_joined(hello))

    def _lose(self, name: str, cause: str) -> None:
        node = self._nodes.pop(name)
        self._lost.add(name)
        logger.warning("node %s is lost: %s", name, cause)
        node.channel.abort()
        self._act(self._membership.node_lost(name, cause, time.monotonic()))

    def _heard(self, name: str, node: _Node, message: Message) -> None:
        now_s = time.monotonic()
        node.heard_s = now_s
        if isinstance(message, say.NodeHello):
            self._join(message)
            return
        if isinstance(message, say.NodeBeat):
            node.beat = message
            self._pace.seen(message.step, now_s)
            if now_s - node.leased_s >= self.limits.lease_every_s:
                node.leased_s = now_s
                node.channel.send(say.Lease(sent_s=message.sent_s))
        self._act(self._membership.handle(message, name, now_s))

    # Time

    def _tick(self, now_s: float) -> None:
        late_s = now_s - self._ticked_s
        self._ticked_s = now_s
        if late_s > LATE_S:
            # This process itself was held up: beats may lie unread.
            for node in self._nodes.values():
                node.heard_s = now_s
        for name, node in list(self._nodes.items()):
            silent_s = now_s - node.heard_s
            if silent_s > self.limits.node_silence_s:
                self._lose(name, f"its agent was silent for {silent_s:.1f} s")
        self._act(self._membership.tick(now_s))
        self._find_stuck()

    def _find_stuck(self) -> None:
        beats = [node.beat for node in self._nodes.values() if node.beat and node.beat.alive]
        if beats and all(beat.stuck_s > 0.0 for beat in beats):
            least_s = min(beat.stuck_s for beat in beats)
            for node in self._nodes.values():
                node.beat = None  # the next beats tell whether it is over
            self._act(self._membership.stuck(f"all ranks have waited for {least_s:.0f} s"))

    # Actions

    def _act(self, actions: Iterable[Action]) -> None:
        # The same message for many ranks is packed once, and sent once to every node.
        for _, group in groupby(actions, _shared_message):
            first, *others = group
            match first:
                case ToRank(message=message):
                    self._to_ranks(message, [one.rank for one in (first, *others)])  # type: ignore[union-attr]
                case ToNode(node=name, message=message):
                    self._to_node(name, message)
                case NeedPlan():
                    self._thread.spawn(self._plan(first))
                case Prepare(need=need):
                    self._prepare(need)
                case Say(line=line):
                    print(line, file=sys.stderr, flush=True)  # noqa: T201 - for people
                case Record():
                    self._record(first)
                case End(exit_code=exit_code, cause=cause):
                    self._on_end(exit_code, cause)

    def _to_ranks(self, message: Message, ranks: Iterable[int]) -> None:
        payload = packed(message)
        of_node: dict[str, list[int]] = {}
        for rank in ranks:
            of_node.setdefault(self._node_of.get(rank, ""), []).append(rank)
        for name, here in of_node.items():
            self._to_node(name, say.ForRanks(ranks=tuple(here), message=payload))

    def _to_node(self, name: str, message: Message) -> None:
        if isinstance(message, say.Assigned):
            self._node_of.update(dict.fromkeys(message.ranks, name))
        node = self._nodes.get(name)
        if node is not None:  # of a lost one the rules hear, or have heard
            node.channel.send(message)

    async def _plan(self, needed: NeedPlan) -> None:
        try:
            future = asyncio.wrap_future(self._planner(needed))
            answer = await asyncio.wait_for(future, self.limits.plan_s)
        except Exception as error:
            # A planner that fails is a case for the rules: they end the job, or go on without.
            logger.exception("planner failed")
            answer = Answer(None, f"the planner failed: {error!r}")
        self._act(self._membership.planned(needed.request, answer))

    # People

    def _answer(self, asked: say.Ask) -> say.Answer:
        try:
            match asked.verb:
                case "status":
                    return say.Answer(ok=True, text=json.dumps(self._status()))
                case "drain":
                    self._act(self._membership.drain(asked.node))
                    text = f"node {asked.node} leaves the job at the next boundary between steps"
                    return say.Answer(ok=True, text=text)
                case "join":
                    self._act(self._membership.readmit(asked.node))
                    text = f"node {asked.node} may take part again"
                    return say.Answer(ok=True, text=text)
        except KeyError:
            known = ", ".join(sorted(self._nodes)) or "none"
            return say.Answer(ok=False, text=f"there is no node {asked.node!r}; nodes: {known}")
        return say.Answer(ok=False, text=f"unknown command {asked.verb!r}")

    def _status(self) -> dict[str, Any]:
        beats = {name: node.beat for name, node in self._nodes.items() if node.beat}
        now_s = time.monotonic()
        return {
            **self._membership.status(),
            "step": max((beat.step for beat in beats.values()), default=0),
            "step_s": self._pace.step_s,
            "alive": {name: list(beat.alive) for name, beat in beats.items()},
            "heard_ago_s": {n: round(now_s - node.heard_s, 3) for n, node in self._nodes.items()},
            "dropped": self.counters.as_dict(),
        }


def _failure(error: BaseException) -> str:
    return f"the coordinator failed: {error!r}"[:1000]


def _shared_message(action: Action) -> int:
    return id(action.message) if isinstance(action, ToRank) else id(action)


def raise_descriptors() -> None:
    """One descriptor a node: the usual 1024 are too few for a large job."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
