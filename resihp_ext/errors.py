"""The one error tree of the project, and the exit codes that schedulers rely on.

Promise: everything a user can cause is a :class:`UserError` and reaches them as one line
(what, where, what to do) with exit code 2. Anything else keeps its traceback.
"""

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_GIVE_UP = 3
"""It would fail again: a scheduler must not requeue the job."""
EXIT_REQUEUE = 75
"""Not enough is left to go on; started anew, the job resumes (EX_TEMPFAIL of sysexits.h)."""


class ResiHPError(Exception):
    """Root of every error that this project raises on purpose."""

    exit_code = EXIT_FAILURE
    """Of a process that ends with it."""
    speaks: bool | None = None
    """Whether this rank prints it. None: what is wrong is wrong on every rank, so the first process
    of each node speaks for all."""


class UserError(ResiHPError, ValueError):
    """Bad input from the user: flags, files, layouts. Shown as one line, exit code 2."""

    exit_code = EXIT_USAGE


class CheckpointError(ResiHPError):
    """Saving or loading a checkpoint failed while the job ran."""


class UpstreamDriftError(ResiHPError):
    """The installed Megatron or torch is not what a patch assumes; names symbol and version."""
