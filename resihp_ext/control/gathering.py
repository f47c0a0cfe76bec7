"""From a loss to the next plan: an epoch gathers whoever is left, until all run together again.

Nobody is asked what others do: members that are told of an epoch break off what they wait for and
say so. Who does not is ended, which begins the next epoch.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, ToNode
from resihp_ext.control.ending import end, finish, save_and_stop, stop
from resihp_ext.control.job_state import (
    Job,
    KnownPlan,
    Phase,
    Recovery,
    line,
    ranks_text,
    to_all,
)
from resihp_ext.control.last import holding_plan
from resihp_ext.control.messages import Loss
from resihp_ext.control.slots import State
from resihp_ext.errors import EXIT_GIVE_UP, EXIT_REQUEUE


def gather(job: Job, reason: str, *, counts: bool = True) -> list[Action]:
    """Begins the next epoch.

    Args:
        counts: Whether a repetition would be the same failure again.
    """
    if job.done:
        return finish(job, reason)
    before, job.proposal, job.trouble = job.recovery, None, None
    if before is not None:
        reason = f"{before.reason}; {reason}" if reason else before.reason
        counts |= before.counts and not before.told
    job.members = job.connected()
    if not any(job.slots.of[rank].state is not State.ENTERING for rank in job.members):
        return end(job, EXIT_REQUEUE, f"{reason}; no worker is left")
    job.phase, job.epoch, job.adopted = Phase.RECOVERING, job.next_epoch(), set()
    request, due_s = f"epoch {job.epoch}", job.now_s + job.rules.arrive_s
    usable = [rank for rank in job.members if not job.is_drained(rank)]
    job.recovery = Recovery(
        reason=reason,
        counts=counts,
        request=request,
        due_s=due_s,
        spares=len(usable) < len(job.members),
        began_s=job.now_s if before is None else before.began_s,
    )
    view = say.View(epoch=job.epoch, members=job.members, losses=tuple(job.losses))
    return [*to_all(job.members, view), job.need(request, usable)]


def arrived(job: Job, message: say.Arrived) -> list[Action]:
    """A member is ready to recover."""
    if job.recovery is None or message.epoch != job.epoch or message.rank not in job.members:
        return []
    job.recovery.arrived[message.rank] = message
    job.released.discard(message.rank)
    return _go(job)


def planned(job: Job, plan: KnownPlan | None, why: str) -> list[Action]:
    """The planner's answer for the epoch."""
    recovery = job.recovery
    assert recovery is not None
    if plan is not None:
        recovery.plan = plan
        return _go(job)
    if recovery.spares:
        # Better to go on with a node that somebody wants to have back than not at all.
        recovery.spares = False
        recovery.request = f"epoch {job.epoch} with drained nodes"
        return [job.need(recovery.request, job.members)]
    recovery.end = EXIT_REQUEUE, f"no layout fits what is left ({recovery.reason}): {why}"
    recovery.plan = holding_plan(job)
    return stop(job, *recovery.end) if recovery.plan is None else _go(job)


def _go(job: Job) -> list[Action]:
    """Lets the members go on once all are there and the plan is."""
    recovery = job.recovery
    if recovery is None or recovery.told:
        return []
    entering = [rank for rank in job.members if job.slots.of[rank].state is State.ENTERING]
    here = recovery.arrived
    if set(job.members) - here.keys() - set(entering):
        return []
    veterans = [one for rank, one in here.items() if rank not in entering]
    common = set[int].intersection(*(set(one.versions) for one in veterans))
    if entering and job.plan is not None and job.plan.version in common:
        return _expel(job, entering)
    if set(entering) - here.keys() or recovery.plan is None:
        return []
    common.intersection_update(*(one.versions for one in here.values()))
    first = max(here.values(), key=lambda one: (one.region, -one.rank))
    if _gives_up(job, recovery, first.region):
        cause = f"{job.same} failures in a row without a finished step, at last: "
        recovery.end = EXIT_GIVE_UP, cause + recovery.reason
    return _tell(job, recovery, first, _source(job, common))


def loading(job: Job, message: say.Loading) -> list[Action]:
    """A member reads a checkpoint."""
    recovery = job.recovery
    if recovery is not None and recovery.told and message.epoch == job.epoch:
        recovery.due_s = job.now_s + job.rules.files_s
    return []


def _expel(job: Job, ranks: Collection[int]) -> list[Action]:
    """Newcomers that the members can do without: the state before the change is still there, and
    what newcomers were told of the training loop is out of date."""
    cause = "was not taken in before the next failure"
    killed: list[Action] = []
    for rank in ranks:
        slot = job.slots.of[rank]
        slot.state, slot.cause = State.LOST, cause
        job.losses.append(Loss(rank=rank, cause=cause, time_s=job.zero_s + job.now_s))
        killed.append(ToNode(slot.node, say.Kill(rank=rank, cause=cause)))
    return [*killed, *gather(job, f"{ranks_text(list(ranks))} {cause}", counts=False)]


def _source(job: Job, common: Collection[int]) -> int | None:
    """Of the states that all hold their shares of, the one that lacks the fewest ranks."""
    here = set(job.members)

    def lacking(version: int) -> int:
        known = job.plans.get(version)
        return 0 if known is None else len(known.ranks - here)

    return min(common, key=lambda version: (lacking(version), -version), default=None)


def _gives_up(job: Job, recovery: Recovery, region: int) -> bool:
    """Counts failures without progress between them; the ranks lost may be different ones."""
    if region > job.region:
        job.same = 0
    job.region = max(region, job.region)
    job.same += recovery.counts
    return job.same > job.rules.same_failures


def _tell(job: Job, recovery: Recovery, first: say.Arrived, source: int | None) -> list[Action]:
    plan = recovery.plan
    assert plan is not None
    recovery.told, recovery.due_s = True, job.now_s + job.rules.adopt_s
    job.plans[plan.version] = plan
    job.recoveries += 1
    go = say.Go(
        epoch=job.epoch,
        plan=plan.text,
        region=first.region,
        result=first.result,
        version=source or 0,
        whole=source is not None,
        reason=line(recovery.reason),
    )
    if recovery.end is not None:
        exit_code, cause = recovery.end
        go = msgspec.structs.replace(go, exit_code=exit_code, last=line(cause))
        save_and_stop(job, exit_code, cause)
    return to_all(job.members, go)
