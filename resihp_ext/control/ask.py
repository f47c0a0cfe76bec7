"""What ``resihp status``, ``resihp drain`` and ``resihp join`` ask of a running job.

The launcher leaves ``coordinator.json`` in the job's resilience directory: where the coordinator
listens, and in which file the token is. Who can read that file may command the job.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resihp_ext.control.channel import LinkClosed, open_channel
from resihp_ext.control.counters import Counters
from resihp_ext.control.messages import Answer, Ask
from resihp_ext.control.traffic import PERSON
from resihp_ext.errors import ResiHPError, UserError

logger = logging.getLogger(__name__)

FILE = "coordinator.json"
TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Invitation:
    """What has to be started on a node that is to join the job."""

    words: tuple[str, ...] = ()
    """Of the command; none if no node can come."""
    folder: str = ""
    """In which it is to be started."""
    needs_token: bool = False
    """Whether the job's token has to be in its environment."""
    obstacle: str = ""
    """Why no node can come."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """Where a job's coordinator is, and the file that holds the job's token in hexadecimal."""

    address: str
    port: int
    token_file: str
    node: str = ""
    """That hosts the coordinator."""
    host: str = ""
    """Name of the machine, which people know better than its address."""
    invitation: Invitation = Invitation()


def write_address(directory: Path, found: Address) -> None:
    """Leaves ``coordinator.json``; a reader never sees a part of it.

    Raises:
        OSError: it cannot be written.
    """
    _write_private(directory / FILE, msgspec.json.encode(found).decode() + "\n")


def write_token(path: Path, token: bytes) -> None:
    """Writes a token that only its owner can read.

    Raises:
        OSError: it cannot be written.
    """
    _write_private(path, token.hex() + "\n")


def _write_private(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def read_address(directory: Path) -> Address:
    """Inverse of :func:`write_address`.

    Raises:
        UserError: there is none, or it is not one.
    """
    path = directory / FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Address)
    except PermissionError:
        raise UserError(f"{path}: only the job's owner can read it") from None
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; is a job running with this directory?"
        ) from None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise UserError(f"{path}: not what a coordinator writes") from None


def parse_address(text: str, token_file: str) -> Address:
    """An address that a person gives as ``HOST:PORT``; an IPv6 host may stand in brackets.

    Raises:
        UserError: it is none.
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"{text!r} is not HOST:PORT")
    return Address(address=host.strip("[]"), port=int(port), token_file=token_file)


def ask(where: Address, verb: str, node: str = "", *, timeout_s: float = TIMEOUT_S) -> Answer:
    """Asks the coordinator, and waits for its answer for a bounded time.

    Raises:
        UserError: the token cannot be read.
        RefusedError: it is not the token of who listens there.
        ResiHPError: the coordinator does not answer.
    """
    token = _read_token(Path(where.token_file))
    try:
        return asyncio.run(asyncio.wait_for(_ask(where, token, verb, node), timeout_s))
    except TimeoutError:
        place = f"{where.address}:{where.port}"
        raise ResiHPError(f"no answer from {place} within {timeout_s:g} s") from None


async def _ask(where: Address, token: bytes, verb: str, node: str) -> Answer:
    place = (where.address, where.port)
    channel = await open_channel(place, token, PERSON, "command", Counters(logger))
    try:
        channel.send(Ask(verb=verb, node=node))
        message, _ = await channel.receive()
    except LinkClosed as closed:
        raise ResiHPError(f"the coordinator at {place[0]}:{place[1]} hung up: {closed}") from None
    finally:
        await channel.close()
    assert isinstance(message, Answer)  # a person's link takes nothing else
    return message


def _read_token(path: Path) -> bytes:
    try:
        return bytes.fromhex(path.read_text(encoding="utf-8").strip())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; only the job's owner has the token") from None
    except ValueError:
        raise UserError(f"{path}: not a token in hexadecimal") from None
