"""The agent's half of the control plane: watches the workers of a node, speaks for them.

Runs in one daemon thread. The launcher starts and ends processes; this tells it when to, and
takes from it what the system says about processes that have ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from resihp_ext.control import messages as say
from resihp_ext.control.counters import Counters
from resihp_ext.control.hang import HangRules, Watch
from resihp_ext.control.local import LocalServer, LocalWorker
from resihp_ext.control.loop_thread import LoopThread
from resihp_ext.control.messages import Message
from resihp_ext.control.traffic import packed
from resihp_ext.control.uplink import Uplink
from resihp_ext.errors import EXIT_FAILURE, EXIT_REQUEUE

logger = logging.getLogger(__name__)

START_S = 10.0
CLOSE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLimits:
    """Times of an agent, in seconds."""

    beat_s: float = 1.0
    """Between two beats to the coordinator."""
    look_s: float = 0.25
    """Between two looks at the workers."""
    lease_s: float = 10.0
    """Without an answer of the coordinator, after which the node takes itself for cut off."""
    drain_s: float = 1.0
    """For the last words of a worker that has ended."""
    hang: HangRules = field(default_factory=HangRules)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """How a node is at a moment."""

    step: int
    """The furthest that a worker has come."""
    workers: int
    """That are connected."""
    stuck_s: float
    """How long all workers have waited and none has moved, if longer than usual; else 0."""
    unanswered_s: float | None
    """Since the last beat that the coordinator has answered; None before there was one."""
    killed: int
    """Verdicts on workers so far: of the coordinator, and of this node on hung ones."""
    dropped: dict[str, int]
    """Bad messages so far, by kind."""


class NodeOwner(Protocol):
    """What the launcher does for the control plane.

    All are called in the control thread: they must neither block nor raise.
    """

    def greeted(self, hello: say.Hello) -> None:
        """A worker has said Hello: the script cooperates."""

    def said(self, message: say.Armed | say.Leaving) -> None:
        """A worker has said what decides whether its end is a death."""

    def gone(self, rank: int, incarnation: int) -> None:
        """A worker's connection has ended: look at its process now."""

    def assigned(self, ranks: tuple[int, ...]) -> None:
        """This node, which came to a running job, has these ranks."""

    def replace(self, rank: int, incarnation: int) -> None:
        """Start a new process for a rank."""

    def kill(self, rank: int, cause: str) -> None:
        """End a worker with SIGKILL (a stopped process takes no other signal)."""

    def restart(self, cause: str) -> None:
        """Start all workers anew."""

    def end(self, exit_code: int, cause: str) -> None:
        """End all workers, then the agent with this exit code; may be called more than once."""


class NodeControl:
    """Control thread of an agent.

    :meth:`start` before workers are started (they need the socket); :meth:`join` before, too, as
    soon as coordinator and ranks are known; :meth:`started` and :meth:`exited` for every process.
    All methods may be called from any thread.
    """

    def __init__(
        self,
        *,
        node: str,
        token: bytes,
        socket_path: Path,
        owner: NodeOwner,
        limits: NodeLimits | None = None,
    ) -> None:
        self.limits = limits or NodeLimits()
        self.counters = Counters(logger)
        self._node, self._owner = node, owner
        self._watch = Watch(self.limits.hang)
        self._incarnations: dict[int, int] = {}
        self._kills: dict[int, str] = {}
        self._killed = 0
        self._ended = False
        self._uplink = Uplink(
            token,
            self.counters,
            lease_s=self.limits.lease_s,
            on_message=self._from_coordinator,
            on_cut_off=self._cut_off,
        )
        self._thread = LoopThread("node control", self._run, self._failed)
        self._local = LocalServer(
            socket_path,
            token,
            self.counters,
            on_message=self._from_worker,
            on_closed=self._closed,
            on_error=self._thread.fail,
        )

    def start(self) -> None:
        """Listens for workers.

        Raises:
            OSError: the socket cannot be made.
            ResiHPError: the thread did not start in time.
        """
        self._thread.start(START_S)

    def join(self, host: str, port: int, hello: say.NodeHello, timeout_s: float = 60.0) -> None:
        """Connects to the coordinator; again, after a restart with other ranks: only tells it.

        Raises:
            ResiHPError: the coordinator could not be reached in time.
        """
        future = self._thread.submit(self._join((host, port), hello, timeout_s))
        future.result(timeout_s + START_S)

    def started(self, rank: int, incarnation: int) -> None:
        """A process was started for a rank."""
        self._thread.call(self._started, rank, incarnation)

    def exited(self, rank: int, incarnation: int, cause: str, exit_code: int) -> None:
        """A process has ended, as the system says; a kill by a verdict gets the verdict's cause."""
        self._thread.call(self._spawn_exited, rank, incarnation, cause, exit_code)

    def facts(self, timeout_s: float) -> NodeFacts:
        """How this node is; from any other thread.

        Raises:
            ResiHPError: the thread has ended.
            TimeoutError: it did not answer in time.
        """
        return self._thread.ask(self._facts, timeout_s)

    def _facts(self) -> NodeFacts:
        return NodeFacts(
            step=self._watch.step,
            workers=len(self._local.workers),
            stuck_s=self._watch.stuck_s(time.monotonic()),
            unanswered_s=self._uplink.unanswered_s,
            killed=self._killed,
            dropped=self.counters.as_dict(),
        )

    def close(self) -> None:
        """Ends the thread; workers that still run lose their agent.

        Raises:
            Exception: what has gone wrong in the thread, if anything.
        """
        self._ended = True
        self._thread.stop(CLOSE_S)

    async def _run(self) -> None:
        await self._local.open()
        self._thread.ready()
        try:
            beat_s = time.monotonic()
            while True:
                now_s = time.monotonic()
                self._look(now_s)
                if now_s >= beat_s:
                    self._beat(now_s)
                    beat_s = now_s + self.limits.beat_s
                await asyncio.sleep(self.limits.look_s)
        finally:
            await self._uplink.close()
            await self._local.close()

    async def _join(self, where: tuple[str, int], hello: say.NodeHello, timeout_s: float) -> None:
        if self._uplink.greet(hello):
            return
        await self._uplink.connect(where, hello, timeout_s)
        self._thread.spawn(self._uplink.serve())

    def _failed(self, error: BaseException) -> None:
        self._end(EXIT_FAILURE, f"control thread of node {self._node} failed: {error!r}")

    # Workers

    def _started(self, rank: int, incarnation: int, *, speaks: bool = False) -> None:
        self._incarnations[rank] = incarnation
        self._kills.pop(rank, None)
        self._watch.begin(rank, time.monotonic(), speaks=speaks)

    def _from_worker(self, worker: LocalWorker, message: Message, payload: bytes) -> None:
        now_s = time.monotonic()
        if isinstance(message, say.Progress):
            self._watch.heard(message, now_s)
            return
        if isinstance(message, say.Timed):
            self._uplink.offer(payload)
            return
        if isinstance(message, say.Hello):
            if message.incarnation < self._incarnations.get(message.rank, 0):
                self.counters.count("old process", f"rank {message.rank}")
                worker.channel.abort()
                return
            self._started(message.rank, message.incarnation, speaks=True)
            self._owner.greeted(message)
        elif isinstance(message, say.Leaving):
            self._watch.forget(message.rank)
        if isinstance(message, say.Armed | say.Leaving):
            self._owner.said(message)
        self._uplink.post(payload)

    def _closed(self, worker: LocalWorker) -> None:
        hello = worker.hello
        if self._incarnations.get(hello.rank) == hello.incarnation:
            self._watch.forget(hello.rank)
        if not self._ended:
            self._owner.gone(hello.rank, hello.incarnation)

    def _spawn_exited(self, rank: int, incarnation: int, cause: str, exit_code: int) -> None:
        self._thread.spawn(self._exited(rank, incarnation, cause, exit_code))

    async def _exited(self, rank: int, incarnation: int, cause: str, exit_code: int) -> None:
        worker = self._local.workers.get(rank)
        if worker is not None and worker.hello.incarnation == incarnation:
            # Its last words may say that it leaves: they come before its end.
            await self._local.drained(rank, self.limits.drain_s)
        if self._incarnations.get(rank) == incarnation:
            self._watch.forget(rank)
            cause = self._kills.pop(rank, cause)
        self._uplink.post(
            packed(
                say.Exited(
                    rank=rank, incarnation=incarnation, cause=cause[:1000], exit_code=exit_code
                )
            )
        )

    def _kill(self, rank: int, cause: str) -> None:
        logger.warning("rank %d %s: it is killed", rank, cause)
        self._killed += 1
        self._kills.setdefault(rank, cause)
        self._owner.kill(rank, cause)

    # Time

    def _look(self, now_s: float) -> None:
        for verdict in self._watch.look(now_s, self._is_stopped):
            self._kill(verdict.rank, verdict.cause)
        if not self._ended:
            self._uplink.check_lease()

    def _is_stopped(self, rank: int) -> bool:
        worker = self._local.workers.get(rank)
        try:
            stat = Path(f"/proc/{worker.hello.pid}/stat").read_text() if worker else ""
        except OSError:
            return False
        # The name in parentheses may hold anything; the state follows the last one.
        return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"])

    def _beat(self, now_s: float) -> None:
        self._uplink.beat(
            say.NodeBeat(
                node=self._node,
                step=self._watch.step,
                alive=tuple(sorted(self._local.workers)),
                stuck_s=self._watch.stuck_s(now_s),
                sent_s=now_s,
            )
        )

    # Coordinator

    def _from_coordinator(self, message: Message) -> None:
        match message:
            case say.ForRanks(ranks=ranks, message=payload):
                self._pass_on(ranks, payload)
            case say.Kill(rank=rank, cause=cause):
                self._kill(rank, cause)
            case say.Replace(rank=rank, incarnation=incarnation):
                self._owner.replace(rank, incarnation)
            case say.Assigned(ranks=ranks):
                self._owner.assigned(ranks)
            case say.Restart(cause=cause):
                self._owner.restart(cause)
            case say.EndNode(exit_code=exit_code, cause=cause):
                self._end(exit_code, cause)

    def _pass_on(self, ranks: tuple[int, ...], payload: bytes) -> None:
        ends_waits = isinstance(say.decode(payload), say.View)
        for rank in ranks:
            self._local.post(rank, payload)
            if ends_waits:
                self._watch.told(rank, time.monotonic())

    def _cut_off(self, why: str) -> None:
        # Workers whose agent is gone end themselves, even where the launcher is slow.
        self._local.abort()
        self._end(EXIT_REQUEUE, f"node {self._node} is cut off: {why}")

    def _end(self, exit_code: int, cause: str) -> None:
        if not self._ended:
            self._ended = True
            self._owner.end(exit_code, cause)
