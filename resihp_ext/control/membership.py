"""The coordinator's rules: what follows from every message, without any input or output.

The state is plain data (:mod:`~resihp_ext.control.job_state`); the rules change it:

* :mod:`~resihp_ext.control.losses`: processes and nodes that are gone, and deadlines;
* :mod:`~resihp_ext.control.gathering`: an epoch, from the loss to the next plan;
* :mod:`~resihp_ext.control.changes`: newcomers and drained nodes;
* :mod:`~resihp_ext.control.adapting`: devices that are slow, or fast again;
* :mod:`~resihp_ext.control.ending`: the end.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from resihp_ext.control import adapting, changes, gathering, losses
from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, Answer, Say, ToNode
from resihp_ext.control.job_state import Job, KnownPlan, Phase, Rules, line
from resihp_ext.control.messages import Message
from resihp_ext.control.slots import Node, State
from resihp_ext.control.validation import Crew
from resihp_ext.errors import EXIT_REQUEUE

__all__ = ["Membership", "Phase", "Rules"]


class Membership:
    """Takes messages, gives actions; the same messages give the same actions."""

    def __init__(self, rules: Rules | None = None, zero_s: float | None = None) -> None:
        """Prepares a job that is about to start.

        Args:
            zero_s: The wall clock when the clock of all ``now_s`` shows 0. Default: for
                ``time.monotonic``.
        """
        if zero_s is None:
            zero_s = time.time() - time.monotonic()
        self.job = Job(rules=rules or Rules(), zero_s=zero_s)

    # Nodes

    def node_joined(self, hello: say.NodeHello) -> list[Action]:
        """An agent has connected, or has started its workers anew."""
        job, slots = self.job, self.job.slots
        if job.phase in (Phase.STOPPING, Phase.ENDED):
            cause = line(f"the job is over: {job.cause}")
            return [ToNode(hello.node, say.EndNode(exit_code=job.exit_code, cause=cause))]
        known = slots.nodes.get(hello.node)
        if hello.ranks and job.phase is not Phase.STARTING:
            if known is not None and known.alive and known.ranks == tuple(sorted(hello.ranks)):
                return []  # said twice
            cause = "the job runs without this node"
            return [ToNode(hello.node, say.EndNode(exit_code=EXIT_REQUEUE, cause=cause))]
        if hello.ranks and 0 < hello.attempt < slots.attempt:
            # It came only after the others were told; they wait for it to begin with them.
            return [ToNode(hello.node, say.Restart(cause="others have begun anew"))]
        if hello.ranks and known is not None and slots.all_start(hello.node, hello.ranks):
            return []  # said twice
        slots.nodes[hello.node] = Node(hello.node, hello.address)
        if hello.ranks:
            slots.world_size = hello.world_size
            slots.attempt = max(slots.attempt, hello.attempt)
            slots.add(hello.node, hello.ranks, State.STARTING)
            return []
        ranks = slots.new_ranks(hello.node, hello.slots)
        job.slowness.forget(ranks)
        slots.add(hello.node, ranks, State.PREPARING)
        job.kept = frozenset()
        return [ToNode(hello.node, say.Assigned(ranks=ranks))]

    def node_lost(self, node: str, cause: str, now_s: float) -> list[Action]:
        """An agent's connection is closed, or it is silent."""
        self.job.now_s = max(now_s, self.job.now_s)
        return losses.node_lost(self.job, node, cause)

    # Messages

    def handle(self, message: Message, node: str, now_s: float) -> list[Action]:
        """Everything that follows from a message of a node or of one of its workers."""
        job = self.job
        job.now_s = max(now_s, job.now_s)
        rank = getattr(message, "rank", None)
        if rank is not None and (rank not in job.slots.of or job.slots.of[rank].node != node):
            return []
        handler = _HANDLERS.get(type(message))
        return [] if handler is None else handler(job, message)

    def planned(self, request: str, answer: Answer) -> list[Action]:
        """What the planner has answered to a question."""
        job = self.job
        job.version = max(job.version, answer.version)
        found = None if answer.plan is None else KnownPlan.of(answer.plan, answer.version)
        if job.recovery is not None and request == job.recovery.request:
            return gathering.planned(job, found, answer.why)
        if job.proposal is not None and request == f"proposal {job.proposal.number}":
            return changes.planned(job, found, answer.why)
        return adapting.planned(job, request, answer)

    def tick(self, now_s: float) -> list[Action]:
        """What the passing of time brings."""
        self.job.now_s = max(now_s, self.job.now_s)
        return losses.tick(self.job)

    def stuck(self, cause: str) -> list[Action]:
        """All workers wait and none moves."""
        return losses.stuck(self.job, cause)

    # People

    def drain(self, node: str) -> list[Action]:
        """Takes a node out of the job at the next boundary between steps.

        Raises:
            KeyError: there is no such node.
        """
        return changes.drain(self.job, node)

    def readmit(self, node: str) -> list[Action]:
        """Lets a drained or quarantined node take part again.

        Raises:
            KeyError: there is no such node.
        """
        return changes.readmit(self.job, node)

    def status(self) -> dict[str, Any]:
        """What ``resihp status`` shows."""
        job = self.job
        return {
            "phase": job.phase.value,
            "epoch": job.epoch,
            "members": list(job.members),
            "plan": None if job.plan is None else job.plan.version,
            "standby": list(job.standby()),
            "lost": dict(job.lost),
            "under_way": _under_way(job),
            "recoveries": job.recoveries,
            "recovered": [asdict(one) for one in job.recovered],
            "recovery_times": asdict(job.recovery_times),
            "restarts": job.restarts,
            "speeds": {str(rank): p for rank, p in job.throughput().items()},
            "suspected": dict(job.slowness.suspected),
            "nodes": {
                node.name: {
                    "address": node.address,
                    "alive": node.alive,
                    "drained": node.drained,
                    "kept": any(slot.rank in job.kept for slot in job.slots.on(node.name)),
                    "quarantined": job.is_quarantined(node.name),
                    "ranks": {
                        str(slot.rank): {"state": slot.state.value, "cause": slot.cause}
                        for slot in job.slots.on(node.name)
                    },
                }
                for node in job.slots.nodes.values()
            },
            "cause": job.cause,
            "exit_code": job.exit_code,
            "refused": job.refused,
        }


def _under_way(job: Job) -> str:
    """Why members do something else than train."""
    if job.recovery is not None:
        return job.recovery.reason
    return "" if job.proposal is None else job.proposal.reason


def _hello(job: Job, message: say.Hello) -> list[Action]:
    slot = job.slots.of[message.rank]
    if slot.state in (State.STARTING, State.PREPARING):
        slot.incarnation = max(slot.incarnation, message.incarnation)
    return []


def _described(job: Job, message: say.Described) -> list[Action]:
    if job.phase is Phase.STARTING:
        job.problem, job.plan = message.problem, KnownPlan.of(message.plan)
        job.version = max(job.version, job.plan.version)
        job.speeds.described(message.problem)
        job.validation.recheck_steps = message.recheck_steps
    return []


def _armed(job: Job, message: say.Armed) -> list[Action]:
    slots = job.slots
    if job.phase is not Phase.STARTING or slots.of[message.rank].state is not State.STARTING:
        return []
    slots.of[message.rank].armed = True
    waiting = slots.ranks(State.STARTING)
    if len(waiting) < slots.world_size or not all(slots.of[rank].armed for rank in waiting):
        return []
    # Ranks of an earlier start that was larger.
    slots.of = {rank: slot for rank, slot in slots.of.items() if slot.state is not State.LOST}
    job.members = waiting
    return changes.run(job, job.plan)


def _timed(job: Job, message: say.Timed) -> list[Action]:
    if job.plan is None or job.phase is not Phase.RUNNING:
        return []
    before = job.slowness.report
    nodes = partial(_nodes, job)
    heard = job.slowness.heard(message.times, job.plan.text, nodes)
    said: list[Action] = [Say(text) for text in heard]
    report = job.slowness.report
    if report is None or report is before:
        return said
    said += job.validation.watch(job.slowness, _crew(job), nodes)
    return [*said, *adapting.judged(job, report)]


def _probed(job: Job, message: say.Probed) -> list[Action]:
    if job.phase is not Phase.RUNNING:
        return []
    actions = job.validation.probed(message, job.slowness, partial(_nodes, job))
    report = job.slowness.report
    if not actions or report is None:
        return actions
    found = replace(report, suspects=job.validation.decided)
    return [*actions, *adapting.judged(job, found)]


def _crew(job: Job) -> Crew:
    # While a change is under way nobody has time: what is asked for now would be void.
    return Crew(epoch=job.epoch, members=job.members, free=job.proposal is None)


def _nodes(job: Job) -> dict[int, str]:
    return {rank: slot.node for rank, slot in job.slots.of.items()}


_HANDLERS: dict[type[Message], Callable[[Job, Any], list[Action]]] = {
    say.Hello: _hello,
    say.Described: _described,
    say.Armed: _armed,
    say.NodeBeat: changes.beat,
    say.Exited: losses.exited,
    say.Leaving: losses.left,
    say.Troubled: losses.troubled,
    say.Arrived: gathering.arrived,
    say.Loading: gathering.loading,
    say.Adopted: changes.adopted,
    say.Ready: changes.ready,
    say.Agreed: changes.agreed,
    say.Timed: _timed,
    say.Probed: _probed,
}
