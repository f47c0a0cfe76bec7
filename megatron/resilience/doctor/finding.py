"""One line of the doctor's report."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How much a finding matters; only ``fail`` changes the exit code."""

    OK = "ok"
    INFO = "info"
    """Nothing to do; said because it explains other lines."""
    WARN = "warn"
    """The job runs, but slower, or without a feature."""
    FAIL = "fail"
    """The job cannot run, or would compute or recover wrongly."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do about it (both one line)."""

    check: str
    status: Status
    summary: str
    remedy: str = ""


def ok(check: str, summary: str) -> Finding:
    """Everything as it should be."""
    return Finding(check=check, status=Status.OK, summary=summary)


def info(check: str, summary: str, remedy: str = "") -> Finding:
    """Worth knowing; nothing has to be done."""
    return Finding(check=check, status=Status.INFO, summary=summary, remedy=remedy)


def warn(check: str, summary: str, remedy: str) -> Finding:
    """The job runs, but something is lost."""
    return Finding(check=check, status=Status.WARN, summary=summary, remedy=remedy)


def fail(check: str, summary: str, remedy: str) -> Finding:
    """The job must not be started like this."""
    return Finding(check=check, status=Status.FAIL, summary=summary, remedy=remedy)
