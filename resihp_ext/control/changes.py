"""Changes without a fault: newcomers are taken in, drained nodes left out, one change at a time;
what slow devices ask for comes through here, too.

Members take up a proposal some steps after all of them have been found to know it. Until the
coordinator hears of that, it may take the proposal back; if it was too late, all are gathered.

Who is left out by a change takes no part in it. So a drained node goes in two changes: one to a
plan that does not use it, in which it hands over its state, and one without it.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Collection

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, Prepare, ToNode
from resihp_ext.control.gathering import gather
from resihp_ext.control.job_state import (
    Job,
    KnownPlan,
    Phase,
    Proposal,
    ranks_text,
    to_all,
)
from resihp_ext.control.slots import CONNECTED, GONE, State


def run(job: Job, plan: KnownPlan | None) -> list[Action]:
    """All members run a plan: time for those who wait."""
    job.remember()
    job.phase, job.plan = Phase.RUNNING, plan
    job.plans = {plan.version: plan} if plan else {}
    job.recovery = job.proposal = job.trouble = None
    job.losses, job.adopted, job.ran = [], set(), job.epoch
    for rank in job.members:
        job.slots.of[rank].state = State.MEMBER
    for rank in job.slots.ranks(State.GOING):
        job.slots.of[rank].state = State.AWAY
    job.released -= set(job.members)
    job.kept, job.retry_s = frozenset(), 0.0
    job.speeds.ran(plan.slow if plan else {})
    usable = [rank for rank in job.members if not job.is_drained(rank)]
    return [*replace(job), *propose(job), Prepare(job.question("ahead", usable))]


def adopted(job: Job, message: say.Adopted) -> list[Action]:
    """A worker runs the plan of the epoch, or of the proposal."""
    slot, proposal, recovery = job.slots.of[message.rank], job.proposal, job.recovery
    # Of a change to which nobody new comes this may be heard before the agreement itself.
    due = proposal is not None or (recovery is not None and recovery.told)
    epoch = proposal.epoch if proposal is not None else job.epoch
    if not due or message.epoch != epoch or slot.state not in CONNECTED:
        return []
    if slot.state is State.ENTERING and job.phase is Phase.CHANGING:
        slot.state = State.MEMBER
    job.adopted.add(message.rank)
    job.speeds.taking_s = max(job.speeds.taking_s, message.took_s)
    if job.phase is Phase.CHANGING and proposal is not None:
        # Nobody gets there before all others have the new state.
        proposal.due_s = proposal.due_s or job.now_s + job.rules.adopt_s
    return settle(job)


def settle(job: Job) -> list[Action]:
    """The job runs once all members have adopted what they were told."""
    if set(job.members) - job.adopted:
        return []
    if job.phase is Phase.CHANGING and job.proposal is not None:
        return run(job, job.proposal.plan)
    if job.phase is Phase.RECOVERING and job.recovery is not None and job.recovery.told:
        return run(job, job.recovery.plan)
    return []


# Newcomers


def replace(job: Job) -> list[Action]:
    """New processes for lost ones, on nodes that do not lose one after the other."""
    if job.phase is not Phase.RUNNING or job.done:
        return []
    actions: list[Action] = []
    for rank in job.slots.ranks(State.LOST, State.AWAY):
        slot, node = job.slots.of[rank], job.slots.node_of(rank)
        usable = node.alive and not node.drained and not job.is_quarantined(node.name)
        if not usable or rank not in node.ranks:
            continue
        slot.state, slot.cause, slot.killed_s = State.PREPARING, "", 0.0
        slot.incarnation += 1
        actions.append(ToNode(slot.node, say.Replace(rank=rank, incarnation=slot.incarnation)))
    return actions


def ready(job: Job, message: say.Ready) -> list[Action]:
    """A newcomer can be taken in."""
    slot = job.slots.of[message.rank]
    if slot.state is not State.PREPARING:
        return []
    slot.state, slot.ready_s = State.READY, job.now_s
    return propose(job)


def newcomers_gone(job: Job, gone: Collection[int]) -> list[Action]:
    """Some who were not yet members are lost."""
    proposal = job.proposal
    if proposal is None or proposal.agreed or not set(gone) & set(proposal.newcomers):
        return [*replace(job), *propose(job)]
    return [*withdraw(job), *replace(job), *propose(job)]


# Proposals


def propose(job: Job) -> list[Action]:
    """Takes up whoever is ready and leaves out whoever is to go."""
    if job.phase is not Phase.RUNNING or job.proposal is not None or job.done:
        return []
    drained = {rank for rank in job.members if job.is_drained(rank)} - job.kept
    newcomers = () if job.now_s < job.retry_s else _newcomers(job)
    if not newcomers and not drained:
        return []
    holders = job.plan.ranks if job.plan is not None else frozenset()
    going = sorted(drained - holders)
    members = tuple(sorted({*job.members, *newcomers} - set(going)))
    usable = [rank for rank in members if rank not in drained]
    if not usable:
        return _refuse(job, drained, "no other node would be left")
    reason = _reason(newcomers, drained)
    begin(job, members=members, newcomers=newcomers, going=going, drained=drained, reason=reason)
    return [job.need(f"proposal {job.proposals}", usable)]


def begin(
    job: Job,
    *,
    members: tuple[int, ...],
    newcomers: tuple[int, ...] = (),
    going: Collection[int] = (),
    drained: Collection[int],
    reason: str,
) -> None:
    """Opens a proposal, which has no plan yet."""
    job.proposals, job.adopted = job.proposals + 1, set()
    job.proposal = Proposal(
        number=job.proposals,
        epoch=job.next_epoch(),
        members=members,
        newcomers=newcomers,
        going=tuple(going),
        drained=frozenset(drained),
        reason=reason,
    )


def _newcomers(job: Job) -> tuple[int, ...]:
    """All who are ready, unless others will soon be: each change takes time of all members."""
    able = [job.slots.of[rank] for rank in job.slots.ranks(State.READY) if not job.is_drained(rank)]
    more = any(not job.is_drained(rank) for rank in job.slots.ranks(State.PREPARING))
    oldest_s = min((slot.ready_s for slot in able), default=job.now_s)
    if more and job.now_s - oldest_s < job.rules.batch_s:
        return ()
    return tuple(slot.rank for slot in able)


def planned(job: Job, plan: KnownPlan | None, why: str) -> list[Action]:
    """The planner's answer for the proposal."""
    proposal = job.proposal
    assert proposal is not None
    if plan is None:
        job.proposal = None
        return _refuse(job, proposal.drained, why)
    proposal.plan = job.plans[plan.version] = plan
    job.released.update(proposal.going)
    job.refused = ""
    message = say.Propose(
        number=proposal.number,
        epoch=proposal.epoch,
        members=proposal.members,
        plan=plan.text,
        reason=proposal.reason,
    )
    return to_all(sorted({*job.members, *proposal.members}), message)


def _refuse(job: Job, drained: Collection[int], why: str) -> list[Action]:
    """Without a plan all stay as they are; what is drained must not keep newcomers out."""
    job.refused = f"{ranks_text(sorted(drained))} cannot be spared: {why}" if drained else why
    if drained:
        job.kept |= frozenset(drained)
        return propose(job)
    job.retry_s = job.now_s + job.rules.retry_s
    return []


def withdraw(job: Job) -> list[Action]:
    """Takes back the open proposal, if there is one that can be."""
    proposal = job.proposal
    if proposal is None or proposal.agreed:
        return []
    job.proposal = None
    if proposal.plan is None:
        return []
    told = sorted({*job.members, *proposal.members} & set(job.slots.ranks(*_TALKING)))
    return to_all(told, say.Withdraw(number=proposal.number))


_TALKING = (State.MEMBER, State.GOING, State.READY)


def agreed(job: Job, message: say.Agreed) -> list[Action]:
    """All members are bound by a proposal."""
    proposal = job.proposal
    if job.phase is not Phase.RUNNING or job.slots.of[message.rank].state in GONE:
        return []
    if proposal is None or proposal.plan is None or message.number != proposal.number:
        # It was taken back too late; they would wait for somebody who is gone.
        return gather(job, "a change could not be made", counts=False)
    proposal.step = message.step
    job.phase, job.epoch = Phase.CHANGING, proposal.epoch
    for rank in proposal.going:
        if job.slots.of[rank].state is State.MEMBER:
            job.slots.of[rank].state = State.GOING
    for rank in proposal.newcomers:
        job.slots.of[rank].state = State.ENTERING
    job.members = proposal.members
    enter = say.Enter(number=message.number, step=message.step, loop=message.loop)
    return [*to_all(proposal.newcomers, enter), *settle(job)]


def beat(job: Job, message: say.NodeBeat) -> list[Action]:
    """Once a node is past the step of the change, the change must not take for ever."""
    proposal = job.proposal
    if job.phase is Phase.CHANGING and proposal is not None and message.step > proposal.step:
        proposal.due_s = proposal.due_s or job.now_s + job.rules.adopt_s
    return []


# Operators


def drain(job: Job, node: str) -> list[Action]:
    """Takes a node out of the job at the next boundary between steps.

    Raises:
        KeyError: there is no such node.
    """
    job.slots.nodes[node].drained = True
    job.refused = ""
    actions = withdraw(job)
    for slot in job.slots.on(node):
        if slot.state in (State.PREPARING, State.READY):
            slot.state, slot.cause = State.AWAY, "its node is drained"
            actions.append(ToNode(node, say.Kill(rank=slot.rank, cause=slot.cause)))
    job.kept, job.retry_s = frozenset(), 0.0
    return [*actions, *propose(job)]


def readmit(job: Job, node: str) -> list[Action]:
    """Lets a drained or quarantined node take part again.

    Raises:
        KeyError: there is no such node.
    """
    found = job.slots.nodes[node]
    actions = withdraw(job) if found.drained else []
    found.drained, found.deaths_s = False, []
    job.refused = ""
    return [*actions, *replace(job), *propose(job)]


def _reason(newcomers: Collection[int], drained: Collection[int]) -> str:
    texts = [
        f"{ranks_text(sorted(ranks))} {verb}"
        for ranks, verb in ((newcomers, "joined"), (drained, "drained"))
        if ranks
    ]
    return "; ".join(texts)
