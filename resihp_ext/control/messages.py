"""Every control message of a job: a schema, encoded as MessagePack; nothing else is understood.

Workers talk to the agent of their node over a Unix socket, agents to the coordinator over TCP. What
a worker says to the coordinator, and the other way round, passes through the agent unchanged.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from resihp_ext.control.pace_messages import Probe as Probe
from resihp_ext.control.pace_messages import Probed as Probed
from resihp_ext.control.pace_messages import Timed as Timed
from resihp_ext.control.pace_messages import Weighed as Weighed
from resihp_ext.control.schema import (
    Count,
    Figures,
    Line,
    Name,
    Rank,
    Ranks,
    Raw,
    Text,
)
from resihp_ext.control.schema import Message as Message


class Loss(Message, frozen=True, kw_only=True, tag="loss"):
    """A rank that is gone."""

    rank: Rank
    cause: Line
    """As a person reads it: "was killed by signal 9 (SIGKILL)"."""
    time_s: float = 0.0
    """When it was seen, in seconds since the epoch."""


# From workers.


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """The first words of a worker."""

    rank: Rank
    incarnation: Count
    """How many processes had this rank before."""
    pid: Count
    joins: bool
    """Whether it comes to a job that already runs."""


class Described(Message, frozen=True, kw_only=True, tag="described"):
    """What the coordinator needs to plan; from the lowest rank, before the first step."""

    rank: Rank
    problem: Text
    """JSON of ``resihp_ext.control.planning.Brief``."""
    plan: Text
    """JSON of the plan that runs."""
    recheck_steps: Count = 0
    """Steps between two measurements of what was found slow; 0: none."""


class Armed(Message, frozen=True, kw_only=True, tag="armed"):
    """A worker is about to begin its first step: from here on the job survives its death."""

    rank: Rank


class Progress(Message, frozen=True, kw_only=True, tag="progress"):
    """How far a worker is; also the sign that it lives."""

    rank: Rank
    step: Count
    micro_batch: Count
    phase: Name
    waiting: bool
    """Whether it waits for other ranks, in a collective or for a message."""
    ticks: Count
    """Grows with every action that ends; a worker whose ticks stand still makes no progress."""


class Arrived(Message, frozen=True, kw_only=True, tag="arrived"):
    """A survivor has stopped what it did and is ready to recover."""

    rank: Rank
    epoch: Count
    region: Count
    """Stretches of work between two agreements of all ranks that it has finished."""
    result: Figures
    """What the last finished one gave."""
    versions: Annotated[tuple[Count, ...], Meta(max_length=8)]
    """Plans of which it holds its whole share of the state."""
    phase: Name
    """Where it was stopped."""


class Loading(Message, frozen=True, kw_only=True, tag="loading"):
    """A member reads a checkpoint, which takes as long as it takes."""

    rank: Rank
    epoch: Count


class Troubled(Message, frozen=True, kw_only=True, tag="troubled"):
    """A worker has lost a connection and does not know why, or cannot do what others wait for."""

    rank: Rank
    epoch: Count
    text: Line


class Adopted(Message, frozen=True, kw_only=True, tag="adopted"):
    """A worker runs the plan of an epoch or a proposal."""

    rank: Rank
    epoch: Count
    version: Count
    took_s: Annotated[float, Meta(ge=0)] = 0.0
    """The change to it, in this worker."""


class Agreed(Message, frozen=True, kw_only=True, tag="agreed"):
    """All members know a proposal, and take it up before a step; from the lowest rank."""

    rank: Rank
    number: Count
    step: Count
    loop: Text
    """JSON of what the training loop of a newcomer has to be told."""


class Ready(Message, frozen=True, kw_only=True, tag="ready"):
    """A newcomer has prepared everything that it can prepare alone."""

    rank: Rank


class Leaving(Message, frozen=True, kw_only=True, tag="leaving"):
    """A worker ends on purpose; its exit is no death."""

    rank: Rank
    exit_code: Annotated[int, Meta(ge=0, lt=256)]
    cause: Line = ""
    checkpoint: Line = ""
    """Where the job can go on from, for people."""


# To workers.


class View(Message, frozen=True, kw_only=True, tag="view"):
    """Who is left: abort what is pending and arrive."""

    epoch: Count
    members: Ranks
    losses: tuple[Loss, ...]


class Go(Message, frozen=True, kw_only=True, tag="go"):
    """All members have arrived: what to run, and from where."""

    epoch: Count
    plan: Text
    """JSON of the plan; its version is new."""
    region: Count
    """The furthest that any member has finished; who lacks it takes ``result``, all others
    repeat what they were at."""
    result: Figures
    version: Count
    """The plan whose state is the source."""
    reason: Line
    whole: bool = True
    """Whether all members have their shares of that state."""
    exit_code: Annotated[int, Meta(ge=0, lt=256)] = 0
    last: Line = ""
    """If it is the end: why. Members save a checkpoint under this plan, and leave with
    ``exit_code``."""


class Propose(Message, frozen=True, kw_only=True, tag="propose"):
    """A change without a fault: taken up at a boundary between steps, once all know of it."""

    number: Count
    epoch: Count
    """Of the group of processes that the change makes."""
    members: Ranks
    plan: Text
    reason: Line


class Withdraw(Message, frozen=True, kw_only=True, tag="withdraw"):
    """A proposal is void, unless all have agreed to it already."""

    number: Count


class Enter(Message, frozen=True, kw_only=True, tag="enter"):
    """A newcomer begins the training loop at a step, and meets the others there."""

    number: Count
    step: Count
    loop: Text


class Stop(Message, frozen=True, kw_only=True, tag="stop"):
    """All members stop together."""

    exit_code: Annotated[int, Meta(ge=0, lt=256)]
    cause: Line


# Between agents and the coordinator.


class NodeHello(Message, frozen=True, kw_only=True, tag="node_hello"):
    """The first words of an agent."""

    node: Name
    address: Name
    ranks: Ranks
    """Slots of this node; none when it comes to a running job, which then gives it some."""
    world_size: Count = 0
    """Ranks of all nodes that begin together with this one."""
    attempt: Count = 0
    """Which start of the workers this is; the same for all who begin together."""
    slots: Count


class Assigned(Message, frozen=True, kw_only=True, tag="assigned"):
    """Global ranks of the slots of a node that came to a running job."""

    ranks: Ranks


class NodeBeat(Message, frozen=True, kw_only=True, tag="node_beat"):
    """A node lives; what its workers do, summed up."""

    node: Name
    step: Count
    alive: Ranks
    stuck_s: float = 0.0
    """Not zero when all its workers wait and none has moved for longer than is usual: for how
    long."""
    sent_s: float = 0.0
    """By the agent's clock; comes back in :class:`Lease`."""


class Lease(Message, frozen=True, kw_only=True, tag="lease"):
    """The coordinator has heard a beat: an agent that gets none of these is cut off."""

    sent_s: float


class ForRanks(Message, frozen=True, kw_only=True, tag="for_ranks"):
    """A message of the coordinator for workers of one node; the agent passes it on unchanged."""

    ranks: Ranks
    message: Raw


class Exited(Message, frozen=True, kw_only=True, tag="exited"):
    """A worker process has ended."""

    rank: Rank
    incarnation: Count
    cause: Line
    exit_code: int


class Kill(Message, frozen=True, kw_only=True, tag="kill"):
    """End a worker that does not make progress, or that is not wanted."""

    rank: Rank
    cause: Line


class Replace(Message, frozen=True, kw_only=True, tag="replace"):
    """Start a new process for a rank whose process has died."""

    rank: Rank
    incarnation: Count


class Restart(Message, frozen=True, kw_only=True, tag="restart"):
    """Start all workers of all nodes anew: one has died before the first step."""

    cause: Line


class EndNode(Message, frozen=True, kw_only=True, tag="end_node"):
    """End all workers of the node, and the agent with this exit code."""

    exit_code: Annotated[int, Meta(ge=0, lt=256)]
    cause: Line


# From people's commands.


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """``resihp status``, ``resihp drain NODE``, ``resihp join``."""

    verb: Name
    node: Name = ""


class Answer(Message, frozen=True, kw_only=True, tag="answer"):
    """What the coordinator says to that."""

    ok: bool
    text: Text
    """JSON for ``status``, a line for people else."""


AnyMessage = (
    Hello
    | Described
    | Armed
    | Progress
    | Arrived
    | Loading
    | Troubled
    | Adopted
    | Agreed
    | Ready
    | Leaving
    | Timed
    | Probed
    | View
    | Go
    | Propose
    | Withdraw
    | Weighed
    | Probe
    | Enter
    | Stop
    | NodeHello
    | Assigned
    | NodeBeat
    | Lease
    | ForRanks
    | Exited
    | Kill
    | Replace
    | Restart
    | EndNode
    | Ask
    | Answer
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: Message) -> bytes:
    """MessagePack of a message."""
    return _encoder.encode(message)


def decode(raw: bytes) -> Message:
    """Inverse of :func:`encode`.

    Raises:
        msgspec.MsgspecError: anything that is not exactly a message of the schema.
    """
    try:
        found: Message = _decoder.decode(raw)
    except (UnicodeDecodeError, RecursionError) as error:  # of strings, of endless nesting
        raise msgspec.DecodeError(str(error)) from None
    return found
