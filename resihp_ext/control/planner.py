"""The coordinator's planner: one process beside it that also thinks ahead.

Once a plan runs, plans are computed for the loss of every single device and node, and for the
return of what is gone, so that the answer after a failure is there already. Whatever happens to
the process, there is an answer: in the worst case a simpler plan, computed here.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path

from resihp_ext.control.actions import Answer, NeedPlan
from resihp_ext.control.planner_worker import HURRY, Question, Reply
from resihp_ext.control.planning import Planned, plan_for, with_version

logger = logging.getLogger(__name__)

Key = tuple[tuple[tuple[int, int, float], ...], str, str]

ROOT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerLimits:
    """Times in seconds, and a size."""

    plan_s: float = 15.0
    """For one plan; members wait for it."""
    ahead_s: float = 120.0
    """For one that nobody waits for."""
    start_s: float = 30.0
    """For the process to come up."""
    give_up_s: float = 1.0
    """For the process to drop what it computes in advance."""
    remembered_bytes: int = 64 * 2**20
    """Of answers that are kept."""


class _LostError(Exception):
    """The process is dead, or takes too long."""


class PlannerProcess:
    """Called with what is needed; the answer comes later, and always.

    All methods may be called from any thread; none blocks but :meth:`close`.
    """

    def __init__(self, limits: PlannerLimits | None = None) -> None:
        self.limits = limits or PlannerLimits()
        self.computed_ahead = 0
        """Plans that were computed before anybody asked for them."""
        self._urgent: deque[tuple[NeedPlan, Future[Answer]]] = deque()
        self._ahead: deque[NeedPlan] = deque()
        self._outdated = False
        """Whether another plan runs than the one that is being thought of."""
        self._known: dict[Key, Planned] = {}
        self._changed = threading.Condition()
        self._bell_out, self._bell = Pipe(duplex=False)
        self._thread: threading.Thread | None = None
        self._closed = False
        self._process: _Process | None = None

    def __call__(self, need: NeedPlan) -> Future[Answer]:
        future: Future[Answer] = Future()
        with self._changed:
            if self._closed:
                future.set_exception(RuntimeError("the planner is closed"))
                return future
            known = self._known.get(_key(need))
            if known is None:
                self._urgent.append((need, future))
                self._ring()
        if known is not None:
            future.set_result(with_version(known, need.version).answer())
        return future

    def prepare(self, need: NeedPlan) -> None:
        """A plan runs: plans for what may happen next are computed when there is time."""
        with self._changed:
            self._known = {key: one for key, one in self._known.items() if key[1:] == _job(need)}
            self._ahead = deque(what_may_happen(need))
            self._outdated = True
            self._ring()

    def start(self) -> None:
        """Starts the process now, so that the first plan need not wait for it."""
        with self._changed:
            self._ring()

    def close(self) -> None:
        """Ends the process, whatever it computes."""
        with self._changed:
            self._closed = True
            thread = self._thread
            if thread is not None:
                self._ring()
        if thread is not None:
            thread.join(self.limits.give_up_s + 5.0)

    def _ring(self) -> None:
        """Wakes the thread; with the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="resihp-planner", daemon=True)
            self._thread.start()
        self._changed.notify_all()
        self._bell.send_bytes(b"!")

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        process = self._process
        return None if process is None else process.pid

    # In the thread

    def _run(self) -> None:
        try:
            while not self._closed:
                self._one()
        finally:
            self._drop()
            with self._changed:
                for _, future in self._urgent:
                    future.cancel()
                self._urgent.clear()

    def _one(self) -> None:
        """One question, or a wait for one."""
        with self._changed:
            if not (self._urgent or self._ahead or self._closed) and self._process is not None:
                self._changed.wait()
            urgent = self._next_urgent()
            ahead = self._ahead.popleft() if urgent is None and self._ahead else None
            self._outdated = False
            self._hush()
        if urgent is not None:
            self._answer(*urgent)
        elif ahead is not None:
            self._think_ahead(ahead)
        elif self._process is None and not self._closed:
            self._try_to_start()

    def _next_urgent(self) -> tuple[NeedPlan, Future[Answer]] | None:
        """With the lock: the oldest question for whose answer members wait, else the oldest."""
        waited = (one for one in self._urgent if not one[0].patient)
        found = next(waited, self._urgent[0] if self._urgent else None)
        if found is not None:
            self._urgent.remove(found)
        return found

    def _hush(self) -> None:
        while self._bell_out.poll():
            self._bell_out.recv_bytes()

    def _try_to_start(self) -> None:
        try:
            self._started(self.limits.start_s)
        except Exception as error:  # noqa: BLE001 - whatever is wrong, it is started anew
            logger.warning("the planner's process does not start: %s", error)
            self._drop()
            with self._changed:
                if not (self._urgent or self._closed):
                    self._changed.wait()

    def _answer(self, need: NeedPlan, future: Future[Answer]) -> None:
        if not (future.running() or future.set_running_or_notify_cancel()):
            return
        known = self._known.get(_key(need))
        planned = with_version(known, need.version) if known else self._computed(need)
        if planned is not None:
            future.set_result(planned.answer())
            return
        with self._changed:
            self._urgent.append((need, future))

    def _computed(self, need: NeedPlan) -> Planned | None:
        """None: another question comes first."""
        until_s = time.monotonic() + self.limits.plan_s
        for _ in range(2):
            try:
                planned = self._ask(need, until_s, urgent=not need.patient)
                if need.patient and planned is None and self._urgent:
                    return None
                if planned is not None:
                    with self._changed:
                        self._remember(need, planned)
                    return planned
            except Exception as error:  # noqa: BLE001 - whatever is wrong, it is started anew
                logger.warning("the planner's process is lost: %s", error)
                self._drop()
            if time.monotonic() >= until_s or self._closed:
                break
        logger.warning("planning without the planner's process: a simpler plan")
        return _inline(need)

    def _think_ahead(self, need: NeedPlan) -> None:
        if _key(need) in self._known:
            return
        try:
            planned = self._ask(need, time.monotonic() + self.limits.ahead_s, urgent=False)
        except Exception as error:  # noqa: BLE001 - whatever is wrong, it is started anew
            logger.warning("the planner's process is lost: %s", error)
            self._drop()
            return
        with self._changed:
            if planned is not None:
                self.computed_ahead += 1
                self._remember(need, planned)
            elif not self._outdated and self._urgent:
                self._ahead.append(need)

    def _remember(self, need: NeedPlan, planned: Planned) -> None:
        """With the lock."""
        self._known[_key(need)] = planned
        if sum(len(one.plan or "") for one in self._known.values()) > self.limits.remembered_bytes:
            self._ahead.clear()  # the likeliest came first

    def _ask(self, need: NeedPlan, until_s: float, *, urgent: bool) -> Planned | None:
        """None: it was given up, or the question makes the process fail."""
        process = self._started(until_s - time.monotonic())
        number = process.ask(need, urgent=urgent)
        hurried = False
        while True:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise _LostError("no answer in time")
            bell = [] if hurried else [self._bell_out]
            ready = wait([process.connection, *bell], left_s)
            if process.connection in ready:
                reply: Reply = process.connection.recv()
                if reply.number == number:
                    return reply.planned
            if self._closed:
                raise _LostError("closed")
            if self._bell_out in ready:
                self._hush()
                if not urgent and (self._urgent or self._outdated):
                    hurried = True
                    process.hurry()
                    until_s = time.monotonic() + self.limits.give_up_s

    def _started(self, timeout_s: float) -> _Process:
        if self._process is None or not self._process.lives:
            self._drop()
            self._process = _Process()
            self._process.wait(max(0.0, min(timeout_s, self.limits.start_s)))
        return self._process

    def _drop(self) -> None:
        if self._process is not None:
            self._process.end()
            self._process = None


class _Process:
    """The process and the way to it."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self._numbers = count()
        paths = [ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
        # Started anew rather than forked, since the launcher has threads; by its own module, since
        # the launcher's would bring torch.
        code = "from resihp_ext.control.planner_worker import main; main()"
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._popen.pid

    @property
    def lives(self) -> bool:
        """Whether it has not ended."""
        return self._popen.poll() is None

    def wait(self, timeout_s: float) -> None:
        """Waits until it is ready: before that, a signal would end it."""
        if not self.connection.poll(timeout_s):
            raise _LostError(f"it has not come up within {timeout_s:g} s")
        self.connection.recv()

    def ask(self, need: NeedPlan, *, urgent: bool) -> int:
        number = next(self._numbers)
        self.connection.send(Question(number, need, urgent))
        return number

    def hurry(self) -> None:
        self._popen.send_signal(HURRY)

    def end(self) -> None:
        self.connection.close()
        self._popen.kill()
        self._popen.wait()


def what_may_happen(need: NeedPlan) -> Iterator[NeedPlan]:
    """The questions that may come next: every device is lost, every node is lost, every lost
    device comes back, all of them do."""
    usable = [rank for rank, _, able in need.devices if able]
    gone = [rank for rank, _, able in need.devices if not able]
    nodes: dict[int, list[int]] = {}
    for rank, node, able in need.devices:
        if able:
            nodes.setdefault(node, []).append(rank)
    changes = [{rank} for rank in usable]
    changes += [set(ranks) for ranks in nodes.values() if len(ranks) > 1]
    changes += [{rank} for rank in gone]
    changes += [set(gone)] if len(gone) > 1 else []
    for changed in changes:
        devices = tuple(
            (rank, node, float(not p) if rank in changed else p) for rank, node, p in need.devices
        )
        if any(able for _, _, able in devices):
            yield replace(need, devices=devices)


def _inline(need: NeedPlan) -> Planned:
    try:
        return plan_for(need, "progressive")
    except Exception as error:
        logger.exception("a plan could not be computed")
        return Planned(plan=None, why=f"the planner failed: {error!r}", version=need.version)


def _job(need: NeedPlan) -> tuple[str, str]:
    return need.problem, need.plan


def _key(need: NeedPlan) -> Key:
    return need.devices, *_job(need)
