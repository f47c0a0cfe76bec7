"""A running job, as people's commands reach it: found by its directory, asked over the network.

What goes wrong has one line and an exit code that tells a job that is over from one that is only
out of reach.
"""

from __future__ import annotations

import ipaddress
import json
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from resihp_ext.control.ask import FILE, TIMEOUT_S, Address, ask, read_address
from resihp_ext.control.channel import RefusedError
from resihp_ext.errors import EXIT_FAILURE, ResiHPError, UserError

EXIT_OVER = 3
EXIT_KEPT = 4
EXIT_LATE = 5

RECORDS = "events.jsonl"
"""What every job leaves in its directory."""
OVER = ("stopping", "ended")


class JobOverError(ResiHPError):
    """There was a job, and it has ended."""

    exit_code = EXIT_OVER


class UnreachableError(ResiHPError):
    """Where the coordinator should be nobody answers."""

    exit_code = EXIT_FAILURE


class KeptError(ResiHPError):
    """A node cannot be spared."""

    exit_code = EXIT_KEPT


class LateError(ResiHPError):
    """Something that was waited for has not happened yet."""

    exit_code = EXIT_LATE


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job whose coordinator can be asked."""

    directory: Path
    where: Address
    timeout_s: float = TIMEOUT_S

    @classmethod
    def find(cls, directory: Path, timeout_s: float = TIMEOUT_S) -> RunningJob:
        """Finds the job that runs with this directory.

        Raises:
            UserError: it is no job's directory, or somebody else's.
            JobOverError: no job runs with it any more.
        """
        _look_at(directory)
        if not _exists(directory / FILE):
            raise _not_there(directory)
        where = read_address(directory)
        beside = directory / Path(where.token_file).name
        if not _exists(Path(where.token_file)) and _exists(beside):
            # The directory is mounted elsewhere on this machine.
            where = replace(where, token_file=str(beside))
        return cls(directory, where, timeout_s)

    def status(self) -> dict[str, Any]:
        """What the coordinator knows.

        Raises:
            UserError, JobOverError, UnreachableError: see :meth:`ask`.
        """
        found: dict[str, Any] = json.loads(self.ask("status"))
        return found

    def ask(self, verb: str, node: str = "") -> str:
        """The coordinator's answer.

        Raises:
            UserError: it refuses; or the token is missing or wrong.
            JobOverError: the job has ended in order.
            UnreachableError: nobody answers.
        """
        try:
            answer = ask(self.where, verb, node, timeout_s=self.timeout_s)
        except ResiHPError as error:
            raise self._explained(error) from None
        if not answer.ok:
            raise UserError(answer.text)
        return answer.text

    def _explained(self, error: ResiHPError) -> ResiHPError:
        if not _exists(self.directory / FILE):
            return JobOverError(f"{self.directory}: the job is over")
        if isinstance(error, UserError):
            return error
        place = f"{self.where.address}:{self.where.port}"
        if isinstance(error, RefusedError) and "wrong token" in str(error):
            return UserError(
                f"{self.where.token_file}: not the token of the job that listens at {place} now; "
                f"{self.directory} may be left over from another"
            )
        return UnreachableError(f"no coordinator answers at {place} ({error}); {self._hint()}")

    def _hint(self) -> str:
        host = self.where.host or "its first node"
        if host != socket.gethostname() and is_loopback(self.where.address):
            return f"only {host} itself reaches that address: ask there"
        return f"the job has ended without a word, or {host} is lost or out of reach from here"


def _look_at(directory: Path) -> None:
    try:
        found = directory.is_dir()
    except PermissionError:
        raise UserError(f"{directory}: only the job's owner can look into it") from None
    if not found:
        raise UserError(f"{directory}: no such directory; give the job's --resilience-dir")


def _not_there(directory: Path) -> ResiHPError:
    below = directory / "resilience"
    if _exists(below / FILE):
        return UserError(f"{directory}: no {FILE} here; did you mean {below}?")
    if _exists(directory / RECORDS):
        return JobOverError(
            f"{directory}: no {FILE}: the job is over, or its ranks have not started yet"
        )
    return UserError(
        f"{directory}: neither {FILE} nor {RECORDS}: no job runs with this --resilience-dir, "
        "or its ranks have not started yet"
    )


def _exists(path: Path) -> bool:
    """Whether it is there; also where looking at it is not allowed."""
    try:
        path.lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether only the machine itself reaches an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
