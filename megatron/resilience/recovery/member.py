"""What a worker has been told by the coordinator, and the waits for it; every wait is bounded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from megatron.resilience.recovery.abort import Abort
from megatron.resilience.recovery.stacks import Stacks
from resihp_ext.control import messages as say
from resihp_ext.control.messages import Message
from resihp_ext.errors import ResiHPError

GO_TIMEOUT_S = 60.0
"""Longest wait for the other survivors and for a plan."""
STACKS_S = 8.0
"""Who has not stopped what it did so long after it was told to says where it hangs."""
ENTER_TIMEOUT_S = 600.0
"""Longest wait of a newcomer for being taken in."""


class StoppedError(ResiHPError):
    """All members were told to stop together."""

    def __init__(self, exit_code: int, cause: str) -> None:
        super().__init__(cause)
        self.exit_code = exit_code


class SupersededError(ResiHPError):
    """Another rank was lost while this one waited: a newer epoch has begun."""


class Link(Protocol):
    """The way to the coordinator."""

    def send(self, message: Message) -> None: ...
    def offer(self, message: Message) -> None: ...


class Member:
    """This worker's side of the conversation.

    :meth:`hear` runs in the link's thread, all else in the main one.
    """

    def __init__(self, rank: int, abort: Abort) -> None:
        self.rank = rank
        self.link: Link | None = None
        self.abort = abort
        self.epoch = 0
        """Of the group of processes that this worker is in, or makes just now."""
        self._changed = threading.Condition()
        self._stacks = Stacks(STACKS_S)
        self._view: say.View | None = None
        self._go: say.Go | None = None
        self._proposal: say.Propose | None = None
        self._probe: say.Probe | None = None
        self._enter: say.Enter | None = None
        self._stop: say.Stop | None = None
        self.heard_s = 0.0
        """When the last view came, on the monotonic clock."""

    def tell(self, message: Message) -> None:
        """Sends a message; does not wait."""
        if self.link is not None:
            self.link.send(message)

    def offer(self, message: Message) -> None:
        """Sends news that is soon out of date, and may get lost; does not wait."""
        if self.link is not None:
            self.link.offer(message)

    def hear(self, message: Message) -> None:
        """Takes a message; a view breaks off at once what this worker waits for."""
        with self._changed:
            match message:
                case say.View() if message.epoch > self.epoch:
                    if self._view is None or message.epoch > self._view.epoch:
                        self._view, self._go, self._proposal = message, None, None
                        self.heard_s = time.perf_counter()
                        self.abort.now()
                        self._stacks.begin()
                case say.Go():
                    self._go = message
                case say.Propose():
                    self._proposal = message
                case say.Withdraw():
                    if self._proposal is not None and self._proposal.number == message.number:
                        self._proposal = None
                case say.Probe():
                    self._probe = message
                case say.Enter():
                    self._enter = message
                case say.Stop():
                    self._stop = message
                    self.abort.now()
                case _:
                    return
            self._changed.notify_all()

    @property
    def proposal(self) -> say.Propose | None:
        """A change that this worker knows of."""
        return self._proposal

    @property
    def probe(self) -> say.Probe | None:
        """The newest measurement that was asked for."""
        return self._probe

    def take_proposal(self) -> say.Propose | None:
        """The change that all have agreed to, once."""
        with self._changed:
            found, self._proposal = self._proposal, None
            if found is not None:
                self.epoch = found.epoch
            return found

    def newer_view(self, timeout_s: float) -> bool:
        """Waits until others are known to be lost; False when nobody is.

        Raises:
            StoppedError: the job is over.
        """
        self._wait(lambda: self._view is not None, timeout_s)
        return self._view is not None

    def enter_view(self) -> say.View:
        """Goes over to the newest epoch."""
        with self._changed:
            self._stacks.end()
            assert self._view is not None
            view, self._view = self._view, None
            self.epoch = view.epoch
            return view

    def wait_for_go(self) -> say.Go:
        """Waits until all survivors have arrived and there is a plan.

        Raises:
            SupersededError: somebody else was lost meanwhile.
            StoppedError: the job is over.
            ResiHPError: no answer in time.
        """

        def come() -> bool:
            return self._view is not None or (self._go is not None and self._go.epoch == self.epoch)

        if not self._wait(come, GO_TIMEOUT_S):
            raise ResiHPError(
                f"rank {self.rank}: the coordinator has not answered for {GO_TIMEOUT_S:.0f} s in "
                f"epoch {self.epoch}"
            )
        with self._changed:
            if self._view is not None:
                raise SupersededError(f"epoch {self._view.epoch} has begun")
            found, self._go = self._go, None
            assert found is not None
            return found

    def wait_to_enter(self, rank: int) -> say.Enter:
        """A newcomer says that it is ready, and waits until members take it in.

        Raises:
            StoppedError: the job is over.
            ResiHPError: nobody did in time.
        """

        def come() -> bool:
            return (
                self._enter is not None
                and self._proposal is not None
                and self._proposal.number == self._enter.number
            )

        self.tell(say.Ready(rank=rank))
        if not self._wait(come, ENTER_TIMEOUT_S):
            raise ResiHPError(f"rank {self.rank}: not taken in for {ENTER_TIMEOUT_S:.0f} s")
        with self._changed:
            assert self._enter is not None
            return self._enter

    def _wait(self, come: Callable[[], bool], timeout_s: float) -> bool:
        with self._changed:
            found = self._changed.wait_for(lambda: come() or self._stop is not None, timeout_s)
            if self._stop is not None:
                raise StoppedError(self._stop.exit_code, self._stop.cause)
            return found
