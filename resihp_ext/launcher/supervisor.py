"""The workers of one node once they survive each other's death.

torch's agent ends all workers when one fails. Here each one's death is reported, and the others
are left alone; what happens to its place is for the coordinator to say.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any, Protocol

from resihp_ext.control import messages as say
from resihp_ext.control.messages import Message
from resihp_ext.errors import EXIT_OK, EXIT_USAGE
from resihp_ext.launcher.outcome import cause_of
from resihp_ext.launcher.places import Failed, Finished, Place
from resihp_ext.launcher.processes import (
    AdoptedHandler,
    AppendingHandler,
    end_helpers,
    signal_group,
)
from resihp_ext.launcher.warm_process import State, Wanted, WarmProcess
from resihp_ext.launcher.watch import Watch

logger = logging.getLogger(__name__)

TICK_S = 0.5
FORK_S = 2.0
"""A warm process that does not fork within this is given up."""
LEAVE_S = 30.0
"""How long workers that have said that they leave may take to end, once the job is over."""
USAGE_S = 5.0
NOTICE_S = 0.3
"""A worker's last words may reach the launcher after its end: wait before calling it a death."""
WARM = "warm"


class Control(Protocol):
    """What a supervisor needs of the control links of its node."""

    def heard(self) -> list[Message]:
        """What the node's workers and the coordinator have said since the last call."""

    def exited(self, message: say.Exited) -> None:
        """Reports the end of a worker."""

    def started(self, rank: int, incarnation: int) -> None:
        """Reports that a process was started for a rank."""


Verdict = Finished | Failed | say.Restart | say.EndNode


@dataclass(slots=True)
class Supervisor:
    """Watches, replaces and ends the processes of one torch context."""

    places: dict[int, Place]
    incarnations: dict[int, int]
    """Processes that each rank of this node has had; outlives this object."""
    context: Any
    """torch's SubprocessContext; replacements are put into it."""
    control: Control
    watch: Watch
    warm: WarmProcess | None
    warm_sign: Path
    numa_options: Any = None
    _waiting: deque[Place] = field(default_factory=deque)
    """Places that are to get a process."""
    _forking: Place | None = None
    _fork_until_s: float = 0.0
    _ending: say.EndNode | say.Restart | None = None
    _end_until_s: float = 0.0
    _notices: deque[tuple[float, Place, int, str]] = field(default_factory=deque)

    def run(self) -> Verdict:
        """Blocks until something has to happen to all workers of the node."""
        for place in self.places.values():
            self._see(place)
        try:
            while True:
                happened = self.watch.wait(TICK_S)
                for message in self.control.heard():
                    self._obey(message)
                for key in happened:
                    self._happened(key)
                self._tick()
                verdict = self._verdict()
                if verdict is not None:
                    return verdict
        finally:
            self._tell_until(float("inf"))
            for place in self.places.values():
                self.watch.discard(place.local_rank)

    def _see(self, place: Place) -> None:
        self.watch.add_process(place.local_rank, place.pid)

    # What happens

    def _happened(self, key: object) -> None:
        if key == WARM:
            self._hear_warm()
        elif isinstance(key, int):
            self._ended(self.places[key])

    def _ended(self, place: Place) -> None:
        exit_code = self.context.subprocess_handlers[place.local_rank].proc.poll()
        if exit_code is None or not place.running:
            return
        place.running, place.exit_code, place.ended_s = False, exit_code, time.monotonic()
        self.watch.discard(place.local_rank)
        if not place.left and exit_code:
            end_helpers(place.pid)
        self._report(place, exit_code, cause_of(exit_code))

    def _report(self, place: Place, exit_code: int, cause: str) -> None:
        self.control.exited(
            say.Exited(
                rank=place.rank,
                incarnation=place.incarnation,
                cause=cause,
                exit_code=exit_code,
            )
        )
        if self._ending is None and exit_code != EXIT_OK:
            so = "the others go on" if place.armed else "before the first step"
            line = f"rank {place.rank} (pid {place.pid}) {cause}; {so}"
            self._notices.append((time.monotonic() + NOTICE_S, place, place.incarnation, line))

    def _obey(self, message: Message) -> None:
        match message:
            case say.Replace(rank=rank, incarnation=incarnation):
                self._replace(rank, incarnation)
            case say.Kill(rank=rank):
                for place in self._of(rank):
                    if place.running:
                        signal_group(place.pid, SIGKILL)
            case say.Restart():
                self._ending, self._end_until_s = message, 0.0
            case say.EndNode():
                self._end(message)
            case say.Armed(rank=rank):
                for place in self._of(rank):
                    place.armed = True
            case say.Leaving(rank=rank):
                for place in self._of(rank):
                    place.left = True
            case _:
                pass

    def _of(self, rank: int) -> list[Place]:
        return [place for place in self.places.values() if place.rank == rank]

    def _end(self, message: say.EndNode) -> None:
        self._ending, self._end_until_s = message, time.monotonic() + LEAVE_S
        self._waiting.clear()
        for place in self.places.values():
            if place.running and not place.left:
                signal_group(place.pid, SIGKILL)

    # New processes

    def _replace(self, rank: int, incarnation: int) -> None:
        for place in self._of(rank):
            if place.running:  # the coordinator gave it up; nobody else may have its rank
                signal_group(place.pid, SIGKILL)
                self.context.subprocess_handlers[place.local_rank].proc.wait(FORK_S)
                self.watch.discard(place.local_rank)
            place.running, place.exit_code, place.incarnation = False, None, incarnation
            self.incarnations[rank] = incarnation
            place.armed = place.left = False
            place.newcomer = True
            self._waiting.append(place)

    def _tick(self) -> None:
        now_s = time.monotonic()
        if self._forking is not None and now_s > self._fork_until_s:
            logger.warning("the warm process did not fork within %g s", FORK_S)
            self._warm_call(WarmProcess.died)
        self._keep_warm()
        while self._waiting and self._forking is None and self._ending is None:
            self._start(self._waiting.popleft())
        self._tell_until(now_s)

    def _tell_until(self, now_s: float) -> None:
        while self._notices and self._notices[0][0] <= now_s:
            _, place, incarnation, line = self._notices.popleft()
            if not (place.left and place.incarnation == incarnation):
                _tell(line)

    def _start(self, place: Place) -> None:
        env = self.context.envs[place.local_rank] | {
            "RESIHP_INCARNATION": str(place.incarnation),
            "RESIHP_JOINS": "1",
        }
        outputs = (self.context.stdouts[place.local_rank], self.context.stderrs[place.local_rank])
        wanted = Wanted(env, place.cpus, outputs)
        if self._warm_call(lambda warm: warm.ask(wanted)):
            self._forking, self._fork_until_s = place, time.monotonic() + FORK_S
            return
        try:
            handler = AppendingHandler(
                entrypoint=self.context.entrypoint,
                args=self.context.args[place.local_rank],
                env=env,
                outputs=outputs,
                local_rank=place.local_rank,
                numa_options=self.numa_options,
            )
        except OSError as error:
            place.exit_code = EXIT_USAGE
            self._report(place, EXIT_USAGE, f"could not be started: {error}")
            return
        self._runs(place, handler)

    def _runs(self, place: Place, handler: Any) -> None:
        self.context.subprocess_handlers[place.local_rank] = handler
        place.pid, place.running = handler.proc.pid, True
        self.control.started(place.rank, place.incarnation)
        self._see(place)

    # The warm process

    def _keep_warm(self) -> None:
        # Only a script that has shown that it waits in a warm process is started once more.
        if self.warm is None or self._ending is not None or not self.warm_sign.exists():
            return
        descriptor = self.warm.start_if_due()
        if descriptor is not None:
            self.watch.add(WARM, descriptor)

    def _hear_warm(self) -> None:
        pid = self._warm_call(WarmProcess.read)
        place = self._forking
        if pid is not None and place is not None:
            self._forking = None
            self._runs(place, AdoptedHandler(pid))

    def _warm_call(self, call: Callable[[WarmProcess], Any]) -> Any:
        """Calls the warm process; when it is found dead, its work is done another way."""
        if self.warm is None:
            return None
        result = call(self.warm)
        if self.warm.state is State.NONE:
            self.watch.discard(WARM)
            if self._forking is not None:
                self._waiting.appendleft(self._forking)
                self._forking = None
        return result

    # The end

    def _verdict(self) -> Verdict | None:
        places = self.places.values()
        running = [place for place in places if place.running]
        if self._ending is not None:
            late = time.monotonic() >= self._end_until_s
            return self._ending if late or not running else None
        for place in places:
            # Before the first step a usage error would only be made again. The coordinator ends
            # the job for it; where that is out of reach, this node ends by itself.
            usage = place.exit_code == EXIT_USAGE and not (place.armed or place.newcomer)
            if usage and time.monotonic() > place.ended_s + USAGE_S:
                return Failed(place.local_rank, place.pid, EXIT_USAGE)
        if running or any(place.exit_code != EXIT_OK for place in places):
            return None
        # Who has begun to train waits for the coordinator's word that all are done.
        return None if any(place.armed for place in places) else Finished()


def _tell(line: str) -> None:
    sys.stderr.write(f"resihp-run: {line}\n")
    sys.stderr.flush()
