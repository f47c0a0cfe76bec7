"""What follows when a process or a node is gone, and when somebody takes too long.

Losses are counted by kind: ``signal`` (somebody killed it), ``exit`` (it ended by itself), ``hang``
(it was silent, stood still or came too late, and was ended for it), ``node`` (with its agent).

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Sequence

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, ToNode
from resihp_ext.control.changes import newcomers_gone, propose
from resihp_ext.control.ending import end, end_if_empty, finish, one_less, stop
from resihp_ext.control.gathering import gather, planned
from resihp_ext.control.job_state import Job, Phase, Trouble, line, named
from resihp_ext.control.messages import Loss
from resihp_ext.control.slots import CONNECTED, GONE, NEWCOMERS, State
from resihp_ext.errors import EXIT_FAILURE, EXIT_REQUEUE, EXIT_USAGE

LOST_KINDS = ("signal", "exit", "hang", "node")
"""Under which losses are counted."""

Gone = Sequence[tuple[int, str]]
"""Ranks, each with the cause."""


def exited(job: Job, message: say.Exited) -> list[Action]:
    """A process has ended."""
    slot = job.slots.of[message.rank]
    if message.incarnation < slot.incarnation or slot.state in GONE:
        return []
    slot.incarnation = message.incarnation
    if slot.state is State.STARTING and job.phase is Phase.STARTING:
        if message.exit_code == 0:
            slot.state = State.LEFT  # there was nothing to do
            return end_if_empty(job)
        if message.exit_code == EXIT_USAGE:
            # The same command line would be refused again; the worker has said why.
            return end(job, EXIT_USAGE, f"rank {message.rank} {message.cause}")
    cause = slot.cause if slot.killed_s else message.cause
    return lost(job, [(message.rank, cause)], kind=_kind(message, told=slot.killed_s > 0))


def _kind(message: say.Exited, *, told: bool) -> str:
    if told or (message.exit_code < 0 and not message.cause.startswith("was killed")):
        return "hang"  # an agent that ends a process for a verdict says the verdict, not the signal
    return "signal" if message.exit_code < 0 else "exit"


def left(job: Job, message: say.Leaving) -> list[Action]:
    """A worker ends on purpose."""
    slot = job.slots.of[message.rank]
    if slot.state in GONE:
        return []
    if slot.state in NEWCOMERS:
        return lost(job, [(message.rank, f"ended with exit code {message.exit_code}")])
    if message.rank in job.released and not message.exit_code:
        slot.state, slot.cause = State.AWAY, "has left: its node is drained"
        if job.phase is Phase.RECOVERING:
            return gather(job, f"rank {message.rank} has left: its node is drained", counts=False)
        return end_if_empty(job)
    slot.state = State.LEFT
    job.checkpoint = job.checkpoint or message.checkpoint
    return _ends(job, message)


def _ends(job: Job, message: say.Leaving) -> list[Action]:
    """The end of the job, for one of its workers."""
    job.exit_code = job.exit_code or message.exit_code
    if job.phase in (Phase.STOPPING, Phase.ENDED):
        return one_less(job)
    if message.exit_code:
        cause = message.cause or f"rank {message.rank} has ended the job"
        return stop(job, message.exit_code, cause)
    if job.phase is Phase.STARTING:
        return end_if_empty(job)
    # It has met all others at the end: whatever happens from here on, their work is done.
    job.done = True
    if job.phase is not Phase.RUNNING:
        return finish(job, "its last members leave")
    return end_if_empty(job)


def lost(job: Job, gone: Gone, *, counts: bool = True, kind: str = "exit") -> list[Action]:
    """Processes are gone.

    Args:
        counts: Whether the job may be to blame, and not only a machine.
        kind: Under which they are counted.
    """
    if not gone:
        return []
    connected = [(r, cause) for r, cause in gone if job.slots.of[r].state in CONNECTED]
    started = [(r, cause) for r, cause in gone if job.slots.of[r].state is State.STARTING]
    for rank, cause in gone:
        slot = job.slots.of[rank]
        if slot.state is not State.ENTERING or job.phase is not Phase.RECOVERING:
            # Otherwise it may have ended because others did.
            job.slots.nodes[slot.node].deaths_s.append(job.now_s)
        slot.state, slot.cause, slot.killed_s = State.LOST, cause, 0.0
    if job.phase in (Phase.STOPPING, Phase.ENDED):
        return one_less(job) if connected else end_if_empty(job)
    job.lost[kind] += len(gone)
    if started:
        return restart(job, named(started[:1]))
    if not connected:
        return newcomers_gone(job, [rank for rank, _ in gone])
    if job.done:
        return finish(job, named(connected))
    seen_s = job.zero_s + job.now_s
    job.losses += [Loss(rank=r, cause=line(cause), time_s=seen_s) for r, cause in connected]
    return gather(job, named(connected), counts=counts)


def node_lost(job: Job, name: str, cause: str) -> list[Action]:
    """An agent is gone, and with it all of its workers."""
    node = job.slots.nodes.get(name)
    if node is None or not node.alive:
        return []
    node.alive, node.ranks = False, ()
    gone = [slot.rank for slot in job.slots.on(name) if slot.state not in GONE]
    causes = [(rank, f"is lost with node {name}: {cause}") for rank in gone]
    return lost(job, causes, counts=False, kind="node")


def restart(job: Job, cause: str) -> list[Action]:
    """Before the first step nothing can be lost: all workers begin again."""
    nodes = {slot.node for slot in job.slots.of.values() if slot.state not in NEWCOMERS}
    told = [node for node in job.slots.alive() if node.name in nodes]
    job.restarts += 1
    if not told:
        return end(job, EXIT_REQUEUE, f"{cause}; no node is left")
    if job.restarts > job.rules.restarts:
        return end(job, EXIT_FAILURE, f"{cause} before the first step")
    job.problem, job.plan = "", None
    job.slots.attempt += 1
    for slot in job.slots.of.values():
        if slot.state not in NEWCOMERS:
            # Its node says what comes next; until then the old process is of no interest.
            slot.state, slot.armed, slot.cause = State.LOST, False, line(cause)
            job.slots.nodes[slot.node].deaths_s.clear()
    return [ToNode(node.name, say.Restart(cause=line(cause))) for node in told]


def troubled(job: Job, message: say.Troubled) -> list[Action]:
    """A member has lost a connection: most often word of the reason is on its way."""
    slot, recovery = job.slots.of[message.rank], job.recovery
    # While all are gathered, it is about to hear why; a change begins in the epoch before it.
    waits = recovery is not None and not recovery.told
    oldest = job.epoch if recovery is not None else job.ran
    if slot.state in CONNECTED and message.epoch >= oldest and not waits and job.trouble is None:
        reason = f"rank {message.rank} cannot go on: {message.text}"
        job.trouble = Trouble(reason, job.now_s)
    return []


def stuck(job: Job, cause: str) -> list[Action]:
    """All wait and none moves: nobody is to blame, all repeat what they were at."""
    if job.phase in (Phase.RUNNING, Phase.CHANGING):
        return gather(job, cause)
    if job.phase is Phase.STARTING and job.slots.ranks(State.STARTING):
        return restart(job, cause)
    return []


# Time


def tick(job: Job) -> list[Action]:
    """What is due."""
    _forget_deaths(job)
    late = _killed_in_vain(job)
    if late:
        return late
    if job.phase is Phase.STOPPING and job.now_s >= job.stop_due_s:
        return end(job, job.exit_code, job.cause)
    trouble, rules = job.trouble, job.rules
    if trouble is not None and job.now_s - trouble.at_s >= rules.trouble_s:
        job.trouble = None
        if job.phase in (Phase.RUNNING, Phase.CHANGING, Phase.RECOVERING):
            return gather(job, trouble.reason)
    if job.phase is Phase.RECOVERING:
        return _hurry(job)
    proposal = job.proposal
    if job.phase is Phase.CHANGING and proposal is not None and 0 < proposal.due_s <= job.now_s:
        return gather(job, f"a change took longer than {rules.adopt_s:g} s")
    return propose(job)


def _hurry(job: Job) -> list[Action]:
    """Members that are late in an epoch."""
    recovery, rules = job.recovery, job.rules
    if recovery is None or job.now_s < recovery.due_s:
        return []
    if recovery.told:
        # Who hangs and who waits for it look the same here; when gathered they do not.
        return gather(job, f"not all members ran the new plan within {rules.adopt_s:g} s")
    late = [rank for rank in job.members if rank not in recovery.arrived]
    if not late:
        if job.now_s < recovery.due_s + rules.arrive_s:
            return []
        return planned(job, None, "there was no answer of the planner")
    slots = [job.slots.of[rank] for rank in late if not job.slots.of[rank].killed_s]
    for slot in slots:
        slot.killed_s = job.now_s
        slot.cause = f"did not arrive within {rules.arrive_s:g} s"
    return [ToNode(slot.node, say.Kill(rank=slot.rank, cause=slot.cause)) for slot in slots]


def _killed_in_vain(job: Job) -> list[Action]:
    """Processes of whose end nothing is heard are taken for dead."""
    limit_s = job.rules.kill_s
    return lost(
        job,
        [
            (slot.rank, slot.cause)
            for slot in job.slots.of.values()
            if slot.killed_s and slot.state not in GONE and job.now_s - slot.killed_s >= limit_s
        ],
        kind="hang",
    )


def _forget_deaths(job: Job) -> None:
    """Old deaths are forgotten where one does not follow the other."""
    for node in job.slots.nodes.values():
        if len(node.deaths_s) < job.rules.deaths:
            node.deaths_s = [
                at_s for at_s in node.deaths_s if job.now_s - at_s < job.rules.window_s
            ]
