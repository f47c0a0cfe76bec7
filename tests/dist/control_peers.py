"""Both ends of the control plane for tests: a worker process, an owner of an agent, small rules."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, Answer, NeedPlan, ToNode
from resihp_ext.control.node import NodeControl, NodeLimits
from resihp_ext.control.server import CoordinatorServer, ServerLimits

WORKER = r"""
import json, os, sys, threading, time
from resihp_ext.control import messages as say
from resihp_ext.control.client import WorkerLink

path, token, rank, incarnation, phase = sys.argv[1:]
rank, ticks, waiting, moving = int(rank), 0, False, True

def tell(**said):
    print(json.dumps(said), flush=True)

def progress():
    global ticks
    ticks += moving
    return say.Progress(rank=rank, step=ticks, micro_batch=0, phase=phase, waiting=waiting,
                        ticks=ticks)

link = WorkerLink(path, bytes.fromhex(token), rank, on_message=lambda m: tell(
    got=type(m).__name__, epoch=getattr(m, "epoch", None), at_s=time.monotonic()),
    progress=progress, on_lost=lambda: tell(lost=True), interval_s=0.05)
link.start()
link.send(say.Hello(rank=rank, incarnation=int(incarnation), pid=os.getpid(), joins=False))
tell(started=os.getpid())
for line in sys.stdin:
    verb, _, rest = line.strip().partition(" ")
    if verb == "send":
        link.send(say.decode(bytes.fromhex(rest)))
    elif verb == "settle":
        enough = ticks + 5
        while ticks < enough:
            time.sleep(0.01)
    elif verb == "stand":
        moving = False
    elif verb == "move":
        moving, waiting = True, False
    elif verb == "wait":
        moving, waiting = False, True
    elif verb == "hold":  # the interpreter, in a call that does not let go of it
        import ctypes
        ctypes.PyDLL(None).usleep(int(float(rest) * 1e6))
    elif verb == "fork":
        if os.fork() == 0:
            time.sleep(float(rest))
            os._exit(0)
    elif verb == "close":
        link.close()
        tell(closed=True)
"""


BARE = r"""
import os, sys, time
from resihp_ext.control import messages as say
from resihp_ext.control.client import WorkerLink

got = []

def wait_for(condition):
    while not condition():
        time.sleep(0.01)

link = WorkerLink(sys.argv[1], bytes.fromhex(sys.argv[2]), 0, on_message=got.append,
    progress=lambda: say.Progress(rank=0, step=0, micro_batch=0, phase="setup", waiting=False,
                                  ticks=0))
link.start()
link.send(say.Hello(rank=0, incarnation=0, pid=os.getpid(), joins=False))
"""


class Worker:
    """A process with a link; what it says comes as a queue of dictionaries."""

    def __init__(
        self, path: Path, token: bytes, rank: int, incarnation: int = 0, phase: str = "forward"
    ) -> None:
        command = [sys.executable, "-c", WORKER, str(path), token.hex(), str(rank)]
        self.process = subprocess.Popen(
            [*command, str(incarnation), phase],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.rank, self.incarnation = rank, incarnation
        self.pid = self.process.pid

    @staticmethod
    def python(path: Path, token: bytes, code: str) -> subprocess.Popen[str]:
        """A process of rank 0 that runs this with its ``link``, then closes it."""
        command = [sys.executable, "-c", f"{BARE}{code}\nlink.close()\n"]
        return subprocess.Popen([*command, str(path), token.hex()], text=True)

    def said(self) -> dict[str, Any]:
        """The next line of the worker; an empty one when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {}
        return found

    def tell(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def send(self, message: say.Message) -> None:
        self.tell("send " + say.encode(message).hex())

    def end(self) -> str:
        """Kills what is left of it; what it wrote to stderr."""
        self.process.kill()
        _, errors = self.process.communicate(timeout=10)
        return errors


class Calls:
    """Everything that was called, with the time, in a queue that a test waits on."""

    def __init__(self) -> None:
        self._queue: queue.Queue[tuple[float, str, tuple[Any, ...]]] = queue.Queue()
        self.seen: list[tuple[float, str, tuple[Any, ...]]] = []

    def add(self, name: str, *args: Any) -> None:
        self._queue.put((time.monotonic(), name, args))

    def wait(
        self, name: str, right: Callable[..., bool] = lambda *_: True, timeout_s: float = 20.0
    ) -> tuple[float, tuple[Any, ...]]:
        """The next call of this name that is right: when it was, and its arguments."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                found = self._queue.get(timeout=max(0.0, until_s - time.monotonic()))
            except queue.Empty:
                raise AssertionError(f"no {name} within {timeout_s} s: {self.seen}") from None
            self.seen.append(found)
            at_s, called, args = found
            if called == name and right(*args):
                return at_s, args

    def none(self, name: str, for_s: float) -> None:
        """Asserts that nothing of this name is called for a while."""
        until_s = time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                found = self._queue.get(timeout=left_s)
            except queue.Empty:
                return
            self.seen.append(found)
            assert found[1] != name, found


class Owner(Calls):
    """An agent's owner that only remembers."""

    def greeted(self, hello: say.Hello) -> None:
        self.add("greeted", hello)

    def said(self, message: say.Message) -> None:
        self.add("said", message)

    def gone(self, rank: int, incarnation: int) -> None:
        self.add("gone", rank, incarnation)

    def assigned(self, ranks: tuple[int, ...]) -> None:
        self.add("assigned", ranks)

    def replace(self, rank: int, incarnation: int) -> None:
        self.add("replace", rank, incarnation)

    def kill(self, rank: int, cause: str) -> None:
        self.add("kill", rank, cause)

    def restart(self, cause: str) -> None:
        self.add("restart", cause)

    def end(self, exit_code: int, cause: str) -> None:
        self.add("end", exit_code, cause)


class SmallRules(Calls):
    """Rules that remember what they hear, and answer with what a test has laid ready."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: dict[type[say.Message], Callable[[Any], list[Action]]] = {}
        self.nodes: set[str] = set()

    def node_joined(self, hello: say.NodeHello) -> list[Action]:
        self.add("joined", hello)
        self.nodes.add(hello.node)
        return [] if hello.ranks else [ToNode(hello.node, say.Assigned(ranks=(7,)))]

    def node_lost(self, node: str, cause: str, now_s: float) -> list[Action]:
        self.add("lost", node, cause)
        return []

    def handle(self, message: say.Message, node: str, now_s: float) -> list[Action]:
        self.add("handle", message, node)
        return self.answers.get(type(message), lambda _: [])(message)

    def planned(self, request: str, answer: Answer) -> list[Action]:
        self.add("planned", request, answer.plan, answer.why, answer.version)
        return []

    def stuck(self, cause: str) -> list[Action]:
        self.add("stuck", cause)
        return []

    def tick(self, now_s: float) -> list[Action]:
        return []

    def drain(self, node: str) -> list[Action]:
        if node not in self.nodes:
            raise KeyError(node)
        self.add("drain", node)
        return []

    def readmit(self, node: str) -> list[Action]:
        self.add("readmit", node)
        return []

    def status(self) -> dict[str, Any]:
        return {"phase": "running"}

    def heard(self, kind: type[say.Message], **fields: Any) -> tuple[float, Any]:
        """Waits for a message with these fields: when it came, and itself."""

        def right(message: say.Message, _node: str) -> bool:
            return isinstance(message, kind) and all(
                getattr(message, name) == value for name, value in fields.items()
            )

        at_s, args = self.wait("handle", right)
        return at_s, args[0]


def plan_at_once(needed: NeedPlan) -> Future[Answer]:
    done: Future[Answer] = Future()
    done.set_result(Answer(f"plan of {needed.request}", "", 2))
    return done


def limits(**changed: Any) -> NodeLimits:
    return NodeLimits(**{"beat_s": 0.1, "look_s": 0.05, "lease_s": 5.0, **changed})


@contextmanager
def coordinator(token: bytes, rules: SmallRules, **more: Any) -> Iterator[CoordinatorServer]:
    more = {"planner": plan_at_once, "limits": ServerLimits(tick_s=0.1), **more}
    server = CoordinatorServer(token=token, host="127.0.0.1", membership=rules, **more)
    server.start()
    try:
        yield server
    finally:
        server.close()


@contextmanager
def agent(
    token: bytes, path: Path, owner: Owner, node: str = "a", changed: NodeLimits | None = None
) -> Iterator[NodeControl]:
    control = NodeControl(
        node=node, token=token, socket_path=path, owner=owner, limits=changed or limits()
    )
    control.start()
    try:
        yield control
    finally:
        control.close()


def node_hello(node: str = "a", ranks: tuple[int, ...] = (0, 1)) -> say.NodeHello:
    return say.NodeHello(node=node, address="127.0.0.1", ranks=ranks, slots=len(ranks) or 1)
