"""Everything that the coordinator knows of a job: plain data, and questions about it.

A job is in one of these phases:

* starting: until every worker is about to begin its first step; a death then restarts all;
* running;
* recovering: somebody is lost; a new epoch gathers the survivors. A further loss begins the next
  epoch, wherever the others are in this one;
* changing: all members have agreed to a proposal, and take it up before a step;
* stopping: all were told to stop; ended.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, NeedPlan, ToRank
from resihp_ext.control.messages import Loss, Message
from resihp_ext.control.slots import CONNECTED, Slots
from resihp_ext.control.slowness import Slowness
from resihp_ext.control.speeds import Speeds
from resihp_ext.control.tally import Tally
from resihp_ext.control.validation import Validation
from resihp_ext.errors import EXIT_OK

REMEMBERED = 20
"""Recoveries that people are shown."""


class Phase(StrEnum):
    """What the job as a whole is doing."""

    STARTING = "starting"
    RUNNING = "running"
    RECOVERING = "recovering"
    CHANGING = "changing"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """Limits of the coordinator."""

    same_failures: int = 5
    """Recoveries in a row without a finished step between them, after which the job gives up. A
    node that is lost as a whole does not count: that is no failure of the job's."""
    deaths: int = 3
    """Lost workers of a node within :attr:`window_s` after which it gets no new ones."""
    window_s: float = 600.0
    restarts: int = 3
    """Restarts of all workers before the first step."""
    trouble_s: float = 0.5
    """After a lost connection: how long to wait for word of who is lost."""
    arrive_s: float = 30.0
    """For members to stop what they did; who takes longer is ended."""
    kill_s: float = 10.0
    """For a node to end a process; after that it is taken for dead."""
    adopt_s: float = 60.0
    """For members to run a new plan; after that all are gathered anew, which shows who hangs."""
    stop_s: float = 60.0
    """For members to leave when they are told to."""
    files_s: float = 600.0
    """For members to load a checkpoint, or to save the last one."""
    batch_s: float = 5.0
    """How long a newcomer that is ready waits for others: each change takes time of all members."""
    retry_s: float = 60.0
    """Until a change for which there was no plan is tried again."""


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """A plan of which members may hold the state."""

    version: int
    text: str
    ranks: frozenset[int] = frozenset()
    """That hold a stage."""
    p: tuple[tuple[int, float], ...] = ()
    """Throughput that is reckoned with, of every rank."""

    @property
    def slow(self) -> dict[int, float]:
        """Of the devices that it takes for slow; dead ones are none."""
        return {rank: p for rank, p in self.p if 0 < p < 1}

    @classmethod
    def of(cls, text: str, version: int = 0) -> KnownPlan:
        """From a plan's JSON; what is none has no ranks.

        Args:
            version: Unless the plan names one.
        """
        try:
            fields = json.loads(text)
            ranks = (
                rank
                for replica in fields["replicas"]
                for stage in replica["stages"]
                for rank in stage["ranks"]
            )
            p = tuple((int(one["rank"]), float(one["p"])) for one in fields["devices"])
            return cls(int(fields["version"]), text, frozenset(ranks), p)
        except (ValueError, KeyError, TypeError):
            return cls(version, text)


@dataclass(slots=True)
class Proposal:
    """A change without a fault that is under way."""

    number: int
    epoch: int
    """Of the group of processes that it makes; nobody else gets this number."""
    members: tuple[int, ...]
    newcomers: tuple[int, ...]
    going: tuple[int, ...]
    """Members that it leaves out."""
    drained: frozenset[int]
    """Members that its plan does not use, because their nodes are drained."""
    reason: str
    plan: KnownPlan | None = None
    """Known to members once it is here."""
    step: int = -1
    """Before which it is done, once all have agreed."""
    due_s: float = 0.0
    """By when all members have to run it; 0 before that step."""

    @property
    def agreed(self) -> bool:
        """Whether all members are bound by it."""
        return self.step >= 0


@dataclass(slots=True)
class Recovery:
    """What an epoch that follows a loss has gathered so far."""

    reason: str
    counts: bool
    """Whether a repetition would be the same failure again."""
    request: str
    due_s: float
    """By when members have to arrive, then by when they have to run the plan."""
    plan: KnownPlan | None = None
    arrived: dict[int, say.Arrived] = field(default_factory=dict)
    told: bool = False
    """Whether members know what to run."""
    end: tuple[int, str] | None = None
    """Exit code and cause, if the job is to end once the state is saved."""
    spares: bool = False
    """Whether the plan that was asked for leaves out members, whose nodes are drained."""
    began_s: float = 0.0
    """When the first of its losses was noticed."""


@dataclass(frozen=True, slots=True)
class Recovered:
    """A recovery that is over."""

    time_s: float
    """When its first loss was noticed, in seconds since the epoch."""
    took_s: float
    """Until all members ran the new plan."""
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class Trouble:
    """A lost connection that nobody has explained yet."""

    reason: str
    at_s: float


@dataclass(slots=True, kw_only=True)
class Job:
    """What must survive a failover of the coordinator."""

    rules: Rules = field(default_factory=Rules)
    zero_s: float = 0.0
    """The wall clock, in seconds since the epoch, when the monotonic one shows 0."""
    now_s: float = 0.0
    """Of the last message or tick."""
    phase: Phase = Phase.STARTING
    epoch: int = 0
    ran: int = 0
    """The epoch in which members last ran together."""
    issued: int = 0
    """The highest epoch that anybody was told of; one that came to nothing is not used again."""
    slots: Slots = field(default_factory=Slots)
    members: tuple[int, ...] = ()
    problem: str = ""
    plan: KnownPlan | None = None
    """That runs, or ran last."""
    plans: dict[int, KnownPlan] = field(default_factory=dict)
    """Of which members may hold the state, by version."""
    version: int = 0
    """The highest that any plan of this job has had, or is to get."""
    losses: list[Loss] = field(default_factory=list)
    """Since the members last ran together."""
    recovery: Recovery | None = None
    proposal: Proposal | None = None
    adopted: set[int] = field(default_factory=set)
    trouble: Trouble | None = None
    done: bool = False
    """Whether a member has left at the end: it has met all others there, so their work is done."""
    exit_code: int = EXIT_OK
    cause: str = ""
    stop_due_s: float = 0.0
    saving: bool = False
    """Whether members save the state before they stop."""
    checkpoint: str = ""
    """Where the job can go on from, as a member has said when it left."""
    lost: Counter[str] = field(default_factory=Counter)
    """Processes that were lost since the job began, by kind: see ``losses``."""
    recoveries: int = 0
    recovered: deque[Recovered] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """The last of them."""
    recovery_times: Tally = field(default_factory=Tally)
    """Of all of them, as ``Recovered.took_s``."""
    restarts: int = 0
    proposals: int = 0
    region: int = -1
    """What was finished at the last recovery."""
    same: int = 0
    """Recoveries since anything was finished."""
    refused: str = ""
    """Why the last change without a fault has no plan."""
    released: set[int] = field(default_factory=set)
    """Ranks that a proposal has left out, open or taken back: that they leave is not the end."""
    kept: frozenset[int] = frozenset()
    """Ranks of drained nodes without which there was no plan."""
    retry_s: float = 0.0
    """Before this nothing is proposed."""
    slowness: Slowness = field(default_factory=Slowness)
    speeds: Speeds = field(default_factory=Speeds)
    validation: Validation = field(default_factory=Validation)

    def connected(self) -> tuple[int, ...]:
        """Ranks without which the others cannot go on."""
        return self.slots.ranks(*CONNECTED)

    def next_epoch(self) -> int:
        """A number that no group of processes has had."""
        self.issued += 1
        return self.issued

    def is_drained(self, rank: int) -> bool:
        """Whether a rank's node is not to be used."""
        return self.slots.node_of(rank).drained

    def is_quarantined(self, node: str) -> bool:
        """Whether a node has lost too many workers lately."""
        return len(self.slots.nodes[node].deaths_s) >= self.rules.deaths

    def standby(self) -> tuple[int, ...]:
        """Members that hold no stage of the plan."""
        if self.plan is None or not self.plan.ranks:
            return ()
        return tuple(rank for rank in self.members if rank not in self.plan.ranks)

    def throughput(self) -> dict[int, float]:
        """Throughput of the members' devices: 1.0 healthy, 0.5 twice as slow; the lower one of what
        the plan reckons with and what is measured."""
        planned = dict(self.plan.p) if self.plan is not None else {}
        found = self.slowness.speeds()
        return {
            rank: min(planned[rank], found.get(rank, 1.0))
            for rank in self.members
            if rank in planned
        }

    def remember(self) -> None:
        """The recovery that was under way is over."""
        if self.recovery is None:
            return
        began_s = self.recovery.began_s
        self.recovery_times.add(self.now_s - began_s)
        self.recovered.append(
            Recovered(
                time_s=self.zero_s + began_s,
                took_s=self.now_s - began_s,
                epoch=self.epoch,
                reason=self.recovery.reason,
            )
        )

    def need(self, request: str, usable: Iterable[int], *, patient: bool = False) -> NeedPlan:
        """Asks for a plan that uses some ranks."""
        self.version += 1
        return self.question(request, usable, patient=patient)

    def question(self, request: str, usable: Iterable[int], *, patient: bool = False) -> NeedPlan:
        """What :meth:`need` asks."""
        allowed, numbers, p_of = set(usable), self.slots.numbers(), self.speeds.used()
        return NeedPlan(
            request=request,
            devices=tuple(
                (rank, numbers[slot.node], p_of.get(rank, 1.0) if rank in allowed else 0.0)
                for rank, slot in sorted(self.slots.of.items())
            ),
            problem=self.problem,
            plan=self.plan.text if self.plan else "",
            version=self.version,
            patient=patient,
        )


def to_all(ranks: Iterable[int], message: Message) -> list[Action]:
    """The same message for several ranks."""
    return [ToRank(rank, message) for rank in ranks]


def named(gone: Iterable[tuple[int, str]]) -> str:
    """Ranks with their causes, for people."""
    causes: dict[str, list[int]] = {}
    for rank, cause in gone:
        causes.setdefault(cause, []).append(rank)
    return "; ".join(
        f"{ranks_text(ranks)} {cause if len(ranks) == 1 else _plural(cause)}"
        for cause, ranks in causes.items()
    )


def _plural(cause: str) -> str:
    verb, _, rest = cause.partition(" ")
    return f"{({'was': 'were', 'is': 'are', 'has': 'have'}).get(verb, verb)} {rest}"


def ranks_text(ranks: Sequence[int]) -> str:
    """``rank 3``, or ``ranks 3, 4``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def line(text: str) -> str:
    """As long as a message may have it."""
    return text[:1000]
