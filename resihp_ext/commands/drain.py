"""``resihp drain``: a node leaves a running job, so that it may be stopped."""

from __future__ import annotations

from resihp_ext.commands.job import KeptError, RunningJob
from resihp_ext.commands.picture import GONE, ranks_are, ranks_in
from resihp_ext.commands.waiting import Patience, Say, Status, check_goes_on, node_of, wait_for
from resihp_ext.errors import ResiHPError, UserError


def drain(job: RunningJob, name: str, patience: Patience | None, say: Say) -> None:
    """Takes a node out of the job; with patience waits until its ranks are away.

    Raises:
        UserError: there is no such node.
        KeptError: the others cannot do without it.
        LateError: it is not away in time.
        ResiHPError: the job is over or out of reach.
    """
    status = job.status()
    check_goes_on(status)
    node = status["nodes"].get(name)
    if node is None:
        known = ", ".join(sorted(status["nodes"])) or "none"
        raise UserError(f"there is no node {name!r} in this job; nodes: {known}")
    if not node["alive"]:
        say(f"node {name} is lost: none of its ranks takes part")
        return
    answer = job.ask("drain", name)
    away = Away(name, hosts=name == job.where.node, job=str(job.directory))
    status = job.status()
    done = away.reached(node_of(status, name), status)  # a node that is kept may be so at once
    if done:
        say(done)
        return
    say(answer)
    if away.hosts:
        say(f"node {name} hosts the coordinator: its launcher has to go on, without ranks")
    if patience is not None:
        wait_for(job, name, away, patience, say)


class Away:
    """No rank of a drained node is left."""

    def __init__(self, name: str, *, hosts: bool, job: str) -> None:
        self.name, self.hosts = name, hosts
        self._job = job

    def reached(self, node: Status, status: Status) -> str:
        """See ``Goal``."""
        if not node["alive"]:
            return f"node {self.name} is lost: none of its ranks takes part"
        if not node["drained"]:
            raise ResiHPError(f"node {self.name} was readmitted in the meantime")
        if not self._here(node, status):
            ranks = ranks_in(node, GONE)
            so = "may be stopped" if not self.hosts else "has to stay: it hosts the coordinator"
            return f"{ranks_are(ranks, 'is', 'are')} away: node {self.name} {so}"
        if node["kept"]:
            raise KeptError(
                f"node {self.name} goes on, and leaves once it can be spared: {status['refused']}; "
                f"`resihp join {self._job} {self.name}` takes that back"
            )
        return ""

    def progress(self, node: Status, status: Status) -> str:
        """See ``Goal``."""
        return f"{ranks_are(self._here(node, status), 'is', 'are')} still there"

    def _here(self, node: Status, status: Status) -> list[int]:
        """Ranks that take part, and those whose processes have not ended yet."""
        gone = set(ranks_in(node, GONE)) - set(status["alive"].get(self.name, ()))
        return [int(rank) for rank in node["ranks"] if int(rank) not in gone]
