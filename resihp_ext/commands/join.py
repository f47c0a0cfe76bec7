"""``resihp join``: a node takes part again, or what to start on a node that is to come."""

from __future__ import annotations

import shlex

from resihp_ext.commands.job import RunningJob, is_loopback
from resihp_ext.commands.picture import ranks_are, ranks_in, state_of
from resihp_ext.commands.waiting import Patience, Say, Status, check_goes_on, wait_for
from resihp_ext.control.ask import Address
from resihp_ext.errors import ResiHPError, UserError
from resihp_ext.launcher.hosting import TOKEN


def join(job: RunningJob, name: str, patience: Patience | None, say: Say, note: Say) -> None:
    """Readmits a node; without a name shows the command for a new one.

    Args:
        say: Takes what is asked for.
        note: Takes explanations of it.

    Raises:
        UserError: there is no such node, or it is not there.
        LateError: it does not take part in time.
        ResiHPError: the job is over or out of reach.
    """
    status = job.status()
    check_goes_on(status)
    if not name:
        note("to be run on the new node, with the same files and environment as on the others:")
        _show(job.where, say, note)
        return
    node = status["nodes"].get(name)
    if node is None or not node["alive"]:
        _show(job.where, say, note)
        raise UserError(_absent(name, status) + "; what to run on a node that comes is above")
    back = Back(name)
    if node["drained"] or node["quarantined"]:
        say(job.ask("join", name))
    elif done := back.reached(node, status):
        say(done)
        return
    else:
        say(f"node {name} is neither drained nor quarantined: {state_of(node)}")
    if patience is not None:
        wait_for(job, name, back, patience, say)


def _absent(name: str, status: Status) -> str:
    if name in status["nodes"]:
        return f"node {name} is lost"
    known = ", ".join(sorted(status["nodes"])) or "none"
    return f"there is no node {name!r} in this job; nodes: {known}"


def command(where: Address) -> str:
    """What joins the job, for a shell.

    Raises:
        UserError: nothing does.
    """
    invited = where.invitation
    if not invited.words:
        raise UserError(f"no node can join this job: {invited.obstacle or 'it names no command'}")
    token = f"{TOKEN}=$(cat {shlex.quote(where.token_file)}) " if invited.needs_token else ""
    return f"cd {shlex.quote(invited.folder)} && {token}{shlex.join(invited.words)}"


def _show(where: Address, say: Say, note: Say) -> None:
    say(command(where))
    words = where.invitation.words
    endpoint = words[words.index("--rdzv-endpoint") + 1].rpartition(":")[0]
    if is_loopback(endpoint.strip("[]")):
        note(f"its rendezvous is at {endpoint}: nobody but {where.host or 'that machine'} gets in")


class Back:
    """All ranks of a node take part."""

    def __init__(self, name: str) -> None:
        self.name = name

    def reached(self, node: Status, status: Status) -> str:
        """See ``Goal``."""
        ranks = ranks_in(node, ("member",))
        if not node["alive"]:
            raise ResiHPError(f"node {self.name} is lost")
        if node["drained"]:
            raise ResiHPError(f"node {self.name} was drained again in the meantime")
        if node["quarantined"]:
            raise ResiHPError(f"node {self.name} is quarantined again: its ranks die")
        if len(ranks) < len(node["ranks"]):
            return ""
        return f"{ranks_are(ranks, 'takes', 'take')} part: node {self.name} is in the job"

    def progress(self, node: Status, status: Status) -> str:
        """See ``Goal``."""
        return f"{state_of(node)}, {_waiting(node)}"


def _waiting(node: Status) -> str:
    states: dict[str, list[int]] = {}
    for rank, slot in node["ranks"].items():
        states.setdefault(slot["state"], []).append(int(rank))
    parts = (ranks_are(ranks, f"is {state}", f"are {state}") for state, ranks in states.items())
    return ", ".join(parts)
