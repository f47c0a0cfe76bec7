"""Places of a job and the processes in them: which ranks there are, where, and in which state.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """What the process of a rank is doing."""

    STARTING = "starting"
    """Comes up together with all others."""
    MEMBER = "member"
    """Trains, or stands by in the group of those that do."""
    GOING = "going"
    """A member that a change leaves out; needed until it says that it leaves."""
    PREPARING = "preparing"
    """A newcomer that gets ready by itself."""
    READY = "ready"
    """A newcomer that waits to be taken in."""
    ENTERING = "entering"
    """A newcomer that is being taken in."""
    LOST = "lost"
    AWAY = "away"
    """Has left, because its node is drained."""
    LEFT = "left"
    """Has ended on purpose, as the job does."""


CONNECTED = (State.MEMBER, State.GOING, State.ENTERING)
"""States of those without whom the others cannot go on."""
NEWCOMERS = (State.PREPARING, State.READY, State.ENTERING)
GONE = (State.LOST, State.AWAY, State.LEFT)


@dataclass(slots=True)
class Slot:
    """A rank's place."""

    rank: int
    node: str
    state: State = State.STARTING
    incarnation: int = 0
    """Processes that were in it before."""
    armed: bool = False
    ready_s: float = 0.0
    """Since when a newcomer waits."""
    killed_s: float = 0.0
    """When its node was told to end it, if it was."""
    cause: str = ""
    """Why the process is lost, or will be."""


@dataclass(slots=True)
class Node:
    """A machine."""

    name: str
    address: str
    alive: bool = True
    ranks: tuple[int, ...] = ()
    """For which its agent can start processes."""
    drained: bool = False
    """Whether it is not to be used, by an operator's word."""
    deaths_s: list[float] = field(default_factory=list)
    """When workers of it were lost."""


@dataclass(slots=True)
class Slots:
    """All places of a job."""

    of: dict[int, Slot] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    world_size: int = 0
    """Ranks that begin together; their agents come one after the other."""
    attempt: int = 0
    """Which start of all workers is under way; agents count them."""

    def add(self, node: str, ranks: Iterable[int], state: State) -> None:
        """Places on a node; a process in one of them is a new one.

        A node counts the processes of its ranks; a node that has come anew counts from 0.
        """
        self.nodes[node].ranks = tuple(sorted(ranks))
        for rank in self.nodes[node].ranks:
            before = self.of.get(rank)
            again = before is not None and before.node == node and state is State.STARTING
            incarnation = before.incarnation + 1 if before is not None and again else 0
            self.of[rank] = Slot(rank, node, state, incarnation)

    def new_ranks(self, node: str, count: int) -> tuple[int, ...]:
        """Ranks for a node that comes: those that it had; then those of lost nodes, so that the
        layout can be again what it was; then numbers that nobody has or is about to get."""
        had = sorted(slot.rank for slot in self.of.values() if slot.node == node)
        orphans = sorted(
            slot.rank
            for slot in self.of.values()
            if slot.node != node and not self.nodes[slot.node].alive and slot.state in GONE
        )
        known = (*had, *orphans)[:count]
        first = max(self.world_size, max(self.of, default=-1) + 1)
        return (*known, *range(first, first + count - len(known)))

    def all_start(self, node: str, ranks: Iterable[int]) -> bool:
        """Whether a node's processes come up, and are these."""
        here = {slot.rank for slot in self.on(node) if slot.state is State.STARTING}
        return self.nodes[node].alive and here == set(ranks)

    def ranks(self, *states: State) -> tuple[int, ...]:
        """Ranks in one of some states, ascending."""
        return tuple(sorted(slot.rank for slot in self.of.values() if slot.state in states))

    def on(self, node: str) -> tuple[Slot, ...]:
        """Places of a node."""
        return tuple(slot for slot in self.of.values() if slot.node == node)

    def node_of(self, rank: int) -> Node:
        """Where a rank is."""
        return self.nodes[self.of[rank].node]

    def alive(self) -> tuple[Node, ...]:
        """Nodes that are connected."""
        return tuple(node for node in self.nodes.values() if node.alive)

    def numbers(self) -> dict[str, int]:
        """Nodes by the order of their lowest ranks: the order in which they came is chance."""
        lowest: dict[str, int] = {}
        for rank, slot in sorted(self.of.items()):
            lowest.setdefault(slot.node, rank)
        return {name: number for number, name in enumerate(lowest)}
