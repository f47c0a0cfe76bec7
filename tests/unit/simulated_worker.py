"""Workers that follow the protocol, for simulations of the coordinator's rules.

A stretch of work ends on a rank once all members of its group have begun it; a change of layout
once all have verified it. Whoever waits for somebody who is gone waits until it is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from resihp_ext.control import messages as say
from resihp_ext.control.job_state import KnownPlan
from resihp_ext.control.messages import Message

GO_TIMEOUT_S = 60.0
VERDICT_S = 10.0


@dataclass(eq=False)
class Worker:
    """A process."""

    rank: int
    incarnation: int
    send: Callable[[Message], None]
    newcomer: bool
    end_at: int
    """The stretch after which the job is done."""
    shared: dict[tuple[str, int, int], dict[int, int]]
    """What ranks have put into what they do together."""
    alive: bool = True
    hung: bool = False
    left: bool = False
    mode: str = "train"
    epoch: int = 0
    members: tuple[int, ...] = ()
    done: int = 0
    begun: int = 0
    held: set[int] = field(default_factory=lambda: {0})
    ballot: int = 0
    """The proposal that was known when the stretch began."""
    due: tuple[int, int] | None = None
    view: say.View | None = None
    go: say.Go | None = None
    proposal: say.Propose | None = None
    enter: say.Enter | None = None
    target: int = 0
    verified: bool = False
    since_s: float = 0.0
    troubled_s: float = 0.0
    exit_code: int = 0

    def start(self) -> None:
        self.send(
            say.Hello(rank=self.rank, incarnation=self.incarnation, pid=1, joins=self.newcomer)
        )
        if self.newcomer:
            self.mode, self.held = "prepare", set()
        else:
            self.send(say.Armed(rank=self.rank))

    def hear(self, message: Message, now_s: float) -> None:
        match message:
            case say.View():
                assert message.epoch > self.epoch, (self, message)
                assert self.view is None or message.epoch > self.view.epoch
                self.view, self.go, self.proposal = message, None, None
            case say.Go():
                assert self.view is not None or message.epoch == self.epoch
                self.go = message
            case say.Propose():
                self.proposal = message
            case say.Withdraw():
                if self.proposal is not None and self.proposal.number == message.number:
                    self.proposal = None
            case say.Enter():
                self.enter = message
            case say.Stop():
                self.leave(message.exit_code)
                return
        if self.view is not None:
            self.obey_view(now_s)

    def obey_view(self, now_s: float) -> None:
        assert self.view is not None
        assert self.rank in self.view.members
        if self.mode in ("prepare", "ready") or (self.newcomer and self.mode == "change"):
            self.alive = False  # what it was told of the loop is void
            return
        view, self.view = self.view, None
        self.epoch, self.members, self.troubled_s = view.epoch, view.members, 0.0
        self.mode, self.since_s = "arrived", now_s
        self.send(
            say.Arrived(
                rank=self.rank,
                epoch=self.epoch,
                region=self.done,
                result=(float(self.done),),
                versions=tuple(sorted(self.held)),
                phase="",
            )
        )

    def leave(self, exit_code: int) -> None:
        self.send(say.Leaving(rank=self.rank, exit_code=exit_code))
        self.alive, self.left = False, True

    def step(self, now_s: float) -> None:
        """Does what can be done now."""
        match self.mode:
            case "ready":
                self.try_to_enter()
            case "arrived":
                self.try_to_go(now_s)
            case "change" | "rebuild":
                self.change()
            case "last":
                if self.joined("saved", 0) is not None:
                    self.leave(self.exit_code)
            case "train":
                self.train()
        if self.troubled_s and now_s - self.troubled_s > VERDICT_S and self.mode != "arrived":
            self.alive = False

    def try_to_enter(self) -> None:
        if self.enter and self.proposal and self.enter.number == self.proposal.number:
            self.take_up()

    def take_up(self) -> None:
        assert self.proposal is not None
        proposal, self.proposal, self.due = self.proposal, None, None
        self.epoch, self.members = proposal.epoch, proposal.members
        if self.rank not in self.members:
            self.leave(0)
            return
        self.mode, self.target = "change", KnownPlan.of(proposal.plan).version
        self.verified = False

    def try_to_go(self, now_s: float) -> None:
        if self.go is None or self.go.epoch != self.epoch:
            self.alive = now_s - self.since_s < GO_TIMEOUT_S
            return
        go, self.go = self.go, None
        assert go.whole, (self, go)
        assert go.version in self.held, (self, go)
        assert go.region - self.done in (0, 1), (self, go)
        self.done = self.begun = go.region
        self.mode, self.target, self.verified = "rebuild", KnownPlan.of(go.plan).version, False
        if go.last:
            self.mode, self.exit_code = "last", go.exit_code

    def joined(self, what: str, number: int, value: int = 0) -> dict[int, int] | None:
        """What all members have put into something collective; None while one is missing."""
        inside = self.shared.setdefault((what, self.epoch, number), {})
        inside.setdefault(self.rank, value)
        return inside if len(inside) == len(self.members) else None

    def change(self) -> None:
        if not self.verified:
            self.verified = self.joined("layout", self.target, self.done) is not None
            if self.verified:
                self.held.add(self.target)
            return
        told = self.joined("commit", self.target, self.done)
        if told is not None:
            self.held = {self.target}
            self.done = self.begun = max(told.values())
            self.mode, self.newcomer = "train", False
            self.send(say.Adopted(rank=self.rank, epoch=self.epoch, version=self.target))

    def train(self) -> None:
        if self.begun == self.done:
            if self.due is not None and self.begun >= self.due[0]:
                number, self.due = self.due[1], None
                if self.proposal is not None and self.proposal.number == number:
                    self.take_up()
                    return
            self.begun += 1
            known = self.proposal.number if self.proposal is not None else 0
            self.ballot = 0 if self.due is not None else known
        told = self.joined("stretch", self.begun, self.ballot)
        if told is None:
            return
        self.done = self.begun
        votes = set(told.values())
        if len(votes) == 1 and votes != {0} and self.proposal is not None:
            (number,) = votes
            self.due = self.done + 2, number
            if self.rank == min(self.members):
                step = self.due[0]
                self.send(say.Agreed(rank=self.rank, number=number, step=step, loop="{}"))
        if self.done >= self.end_at:
            self.leave(0)
