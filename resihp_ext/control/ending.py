"""How a job ends: all members leave by themselves, or are told to.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from resihp_ext.control import messages as say
from resihp_ext.control.actions import Action, End, ToNode
from resihp_ext.control.job_state import Job, Phase, line, to_all
from resihp_ext.control.slots import CONNECTED, State
from resihp_ext.errors import EXIT_GIVE_UP, EXIT_REQUEUE

ADVICE = {
    EXIT_GIVE_UP: "find the reason before it is started again",
    EXIT_REQUEUE: "start it again with --load to go on",
}
"""What to do after a job has ended, by its exit code."""


def stop(job: Job, exit_code: int, cause: str) -> list[Action]:
    """Tells all members to leave; who does not in time is ended with its node."""
    job.phase, job.exit_code, job.cause = Phase.STOPPING, exit_code, line(cause)
    job.stop_due_s = job.now_s + job.rules.stop_s
    job.recovery = job.proposal = job.trouble = None
    job.saving = False
    told = to_all(job.connected(), say.Stop(exit_code=exit_code, cause=job.cause))
    return [*told, *end_if_empty(job)]


def end(job: Job, exit_code: int, cause: str) -> list[Action]:
    """Ends all nodes."""
    job.phase, job.exit_code, job.cause = Phase.ENDED, exit_code, _last_line(job, exit_code, cause)
    job.recovery = job.proposal = job.trouble = None
    message = say.EndNode(exit_code=exit_code, cause=job.cause)
    return [
        *(ToNode(node.name, message) for node in job.slots.alive()),
        End(exit_code, job.cause),
    ]


def _last_line(job: Job, exit_code: int, cause: str) -> str:
    """Cause, checkpoint, and what to do."""
    if exit_code not in ADVICE:
        return line(cause)
    tail = "".join(f"; {text}" for text in (job.checkpoint, ADVICE[exit_code]) if text)
    return line(cause)[: 1000 - len(tail)] + tail


def save_and_stop(job: Job, exit_code: int, cause: str) -> None:
    """Members have been told to save the state before they leave."""
    job.phase, job.exit_code, job.cause = Phase.STOPPING, exit_code, line(cause)
    job.stop_due_s = job.now_s + job.rules.files_s
    job.recovery = job.proposal = job.trouble = None
    job.saving = True


def one_less(job: Job) -> list[Action]:
    """A member of a job that stops is gone: those that save with it would wait in vain."""
    if job.saving and job.connected():
        return stop(job, job.exit_code, job.cause)
    return end_if_empty(job)


def end_if_empty(job: Job) -> list[Action]:
    """When all members are gone, there is nothing left to wait for."""
    waiting = [State.STARTING] if job.phase is Phase.STARTING else CONNECTED
    if job.phase is Phase.ENDED or job.slots.ranks(*waiting):
        return []
    return end(job, job.exit_code, job.cause)


def finish(job: Job, cause: str) -> list[Action]:
    """Something happened to a job that is done: nobody has to wait for anybody."""
    return stop(job, job.exit_code, f"the job is done; {cause}")
