"""Who may say what to whom, and how large it may be."""

from __future__ import annotations

from resihp_ext.control import messages as say
from resihp_ext.control.messages import Message
from resihp_ext.errors import ResiHPError

SMALL_BYTES = 64 * 1024
"""Limit of a message that holds neither plan nor problem nor all ranks of a job."""
LARGE_BYTES = 16 * 1024 * 1024
"""Limit of every other message."""
ENVELOPE_BYTES = 64 * 1024
"""What an agent's message around a worker's may add."""

NEWS_BYTES = 1024 * 1024
"""A peer that has not read so much yet is not told what is soon out of date."""

WORKER, AGENT, PERSON = "worker", "agent", "person"
UP = (
    say.Hello,
    say.Described,
    say.Armed,
    say.Progress,
    say.Arrived,
    say.Loading,
    say.Adopted,
    say.Agreed,
    say.Ready,
    say.Leaving,
    say.Troubled,
    say.Timed,
    say.Probed,
)
TO_SERVER: dict[str, tuple[type[Message], ...]] = {
    WORKER: UP,
    AGENT: (*UP, say.NodeHello, say.NodeBeat, say.Exited),
    PERSON: (say.Ask,),
}
"""What a server takes from whom."""
TO_CLIENT: dict[str, tuple[type[Message], ...]] = {
    WORKER: (
        say.View,
        say.Go,
        say.Propose,
        say.Withdraw,
        say.Weighed,
        say.Probe,
        say.Enter,
        say.Stop,
    ),
    AGENT: (
        say.ForRanks,
        say.Lease,
        say.Assigned,
        say.Kill,
        say.Replace,
        say.Restart,
        say.EndNode,
    ),
    PERSON: (say.Answer,),
}
"""What a client takes, by its own role."""
LARGE = (
    say.Described,
    say.View,
    say.Go,
    say.Propose,
    say.Agreed,
    say.Enter,
    say.ForRanks,
    say.NodeHello,
    say.Answer,
    say.Timed,
)


def packed(message: Message) -> bytes:
    """A message as it is sent.

    Raises:
        ResiHPError: it is larger than any peer takes.
    """
    payload = say.encode(message)
    limit = LARGE_BYTES if isinstance(message, LARGE) else SMALL_BYTES
    if isinstance(message, say.ForRanks):
        limit += ENVELOPE_BYTES
    if len(payload) > limit:
        kind = type(message).__name__
        raise ResiHPError(f"control message {kind} has {len(payload)} bytes, at most {limit}")
    return payload
