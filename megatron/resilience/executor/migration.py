"""Moves micro-batches while a step runs, agreed through the store in which the ranks have met.

No rank waits for another. Whoever has finished a micro-batch as the front runner of its stage may
write a proposal: the lists of the rank groups that would do something else, and for each the place
from which it would (its *hold*). The ranks concerned look before every action. One that has not
passed its hold adds its vote; the last vote makes the proposal count. One that has passed it, or
comes to it while it is still open, drops the proposal. Both write the same key, where only the
first word stands (``compare_set``): so all ranks know the same, and each goes over to the new list
before the place at which it begins to differ.

There is one proposal at a time. All ranks follow all of them, since the next one builds on them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.amend import Amended, Move, rerouted
from resihp_ext.plan.plan import Instance, Plan
from resihp_ext.plan.program import Program
from resihp_ext.scheduler.migration import Decision, Progress, decide

DONE, DROPPED = b"done", b"dropped"
LEAD = 4
"""Actions that a rank may begin until it hears of a proposal: those of one micro-batch."""


class Store(Protocol):
    """What is used of torch's stores."""

    def set(self, key: str, value: str) -> None: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def add(self, key: str, amount: int) -> int: ...
    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...
    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposal:
    move: Move
    changed: Program
    """Lists of the hosts concerned."""
    holds: dict[Instance, int]

    @classmethod
    def of(cls, found: Amended, move: Move) -> _Proposal:
        holds = found.holds
        lists = tuple((host, found.program.actions(host)) for host in sorted(holds))
        return cls(move=move, changed=Program(lists=lists), holds=holds)

    def to_json(self) -> str:
        move = [[one.replica, one.stage] for one in (self.move.source, self.move.target)]
        holds = [self.holds[host] for host in sorted(self.holds)]
        return json.dumps([self.move.micro_batch, move, holds, self.changed.to_text()])

    @classmethod
    def from_json(cls, text: bytes) -> _Proposal:
        number, ends, holds, lists = json.loads(text)
        source, target = (Instance(replica=replica, stage=stage) for replica, stage in ends)
        changed = Program.from_text(lists)
        return cls(
            move=Move(micro_batch=number, source=source, target=target),
            changed=changed,
            holds=dict(zip(changed.instances, holds, strict=True)),
        )


@dataclass
class Course:
    """One rank's way through one pass of a program that may be amended.

    Attributes:
        plan: Of what runs now.
        program: What runs now.
        moves: Those that count, in order, as far as this rank has heard.
    """

    store: Store
    key: str
    """Of the pass; all ranks have the same."""
    host: Instance
    speaks: bool
    """Whether this rank tells the progress of its group."""
    delta: int
    plan: Plan
    program: Program
    now_s: Callable[[], float] = time.perf_counter
    moves: list[Move] = field(default_factory=list)
    proposed: int = 0
    _progress: Progress = field(default_factory=Progress)
    _slot: int = 0
    _open: _Proposal | None = None

    @property
    def actions(self) -> tuple[Action, ...]:
        """What this rank does."""
        return self.program.actions(self.host)

    def before(self, index: int) -> None:
        """The action at ``index`` comes next: it may become another one here, and not later."""
        self._listen(index)
        while self._open is not None and index >= self._open.holds.get(self.host, index + 1):
            self._settle(DROPPED)
            self._listen(index)
        if self.speaks:
            self._progress = replace(self._progress, begun=index + 1)
            self._tell()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Times a computation; looks at the others' progress after a backward."""
        begun_s = self.now_s()
        yield
        if not self.speaks:
            return
        took_s, mine = self.now_s() - begun_s, self._progress
        if action.kind is Kind.FORWARD:
            self._progress = replace(
                mine, forwards=mine.forwards + 1, forward_s=mine.forward_s + took_s
            )
        elif action.kind is Kind.BACKWARD:
            self._progress = replace(
                mine, backwards=mine.backwards + 1, backward_s=mine.backward_s + took_s
            )
            self._tell()
            self._look_around()

    def _listen(self, index: int) -> None:
        """Follows what was proposed and decided since."""
        while True:
            if self._open is None:
                if not self.store.check([self._key("proposal")]):
                    return
                self._open = _Proposal.from_json(self.store.get(self._key("proposal")))
                self._vote(self._open, index)
            elif self.store.check([self._key("word")]):
                self._close(bytes(self.store.get(self._key("word"))))
            else:
                return

    def _vote(self, proposal: _Proposal, index: int) -> None:
        hold = proposal.holds.get(self.host)
        if hold is None:
            return
        if index > hold:
            self._settle(DROPPED)
            return
        voters = sum(self.plan.stage(host).tp for host in proposal.holds)
        if self.store.add(self._key("votes"), 1) == voters:
            self._settle(DONE)

    def _settle(self, word: bytes) -> None:
        """Says the word, unless somebody was first."""
        self._close(bytes(self.store.compare_set(self._key("word"), "", word.decode())))

    def _close(self, word: bytes) -> None:
        proposal = self._open
        assert proposal is not None
        self._open = None
        self._slot += 1
        if word != DONE:
            return
        changed = dict(proposal.changed.lists)
        lists = tuple((host, changed.get(host, mine)) for host, mine in self.program.lists)
        self.plan = rerouted(self.plan, proposal.move)
        self.program = replace(self.program, lists=lists)
        self.moves.append(proposal.move)

    def _look_around(self) -> None:
        if self._open is not None:
            return
        found = self._decision()
        if found is not None:
            self.propose(found.amended, found.move)

    def propose(self, found: Amended, move: Move) -> None:
        """Proposes a move from the program that runs; another rank may be first."""
        self.proposed += 1
        text = _Proposal.of(found, move).to_json()
        # Whose proposal it is to be is heard before the next action, as on all other ranks.
        self.store.compare_set(self._key("proposal"), "", text)

    def _decision(self) -> Decision | None:
        """What is to move from this rank's stage, if it is the front runner there."""
        board = self._board(self._alike())
        if max(one.backwards for one in board.values()) > self._progress.backwards:
            return None
        least = min(one.backwards for one in board.values())
        if self._progress.backwards - least <= self.delta:
            return None
        board = self._board(self.plan.hosts)
        near = self.host
        return decide(self.program, self.plan, board, self.delta, near=near, lead=LEAD)

    def _alike(self) -> Sequence[Instance]:
        layers = self.plan.stage(self.host).layers
        return [one for one in self.plan.hosts if self.plan.stage(one).layers == layers]

    def _board(self, hosts: Sequence[Instance]) -> dict[Instance, Progress]:
        """What others have told in this pass."""
        found = {self.host: self._progress}
        for host in hosts:
            if host != self.host and self.store.check([_place(host)]):
                key, fields = json.loads(self.store.get(_place(host)))
                if key == self.key:
                    found[host] = Progress(**fields)
        return found

    def _tell(self) -> None:
        # One key a group, for all passes: the store does not grow.
        self.store.set(_place(self.host), json.dumps([self.key, asdict(self._progress)]))

    def _key(self, what: str) -> str:
        return f"{self.key}/{self._slot}/{what}"


class Migrations:
    """All passes of a rank.

    Attributes:
        delta: Largest gap in micro-batches that is tolerated; 0: nothing ever moves.
        course: Of the last pass.
    """

    def __init__(self) -> None:
        self.delta = 0
        self.course: Course | None = None
        self._store: Any = None
        self._epoch = self._passes = 0

    def meet(self, store: Any, epoch: int) -> None:
        """The ranks are connected through another store, or anew; all begin to count."""
        self._store, self._epoch, self._passes = store, epoch, 0

    def begin(
        self, plan: Plan, program: Program, host: Instance | None, *, speaks: bool, tidies: bool
    ) -> Course | None:
        """A training pass begins; called on all ranks, None where nothing can move.

        Args:
            host: Of this rank's group; None for a standby.
            speaks: Whether this rank is the first of its group.
            tidies: Whether this rank is the first of the job.
        """
        self.course = None
        if not self.delta:
            return None
        if tidies and self._passes:
            self._forget(self._key)
        self._passes += 1
        if host is not None:
            self.course = Course(
                store=self._store,
                key=self._key,
                host=host,
                speaks=speaks,
                delta=self.delta,
                plan=plan,
                program=program,
            )
        return self.course

    def moved_here(self) -> list[Move]:
        """What this rank's group has taken over in the last pass; known to its first rank."""
        course = self.course
        if course is None or not course.speaks:
            return []
        return [move for move in course.moves if move.target == course.host]

    @property
    def _key(self) -> str:
        return f"migration/{self._epoch}/{self._passes}"

    def _forget(self, key: str) -> None:
        """Nobody asks for the pass before: its gradients are reduced, which all ranks have seen."""
        slot = 0
        while self._store.check([f"{key}/{slot}/proposal"]):
            for what in ("proposal", "votes", "word"):
                self._store.delete_key(f"{key}/{slot}/{what}")
            slot += 1


def _place(host: Instance) -> str:
    return f"migration/progress/{host}"
