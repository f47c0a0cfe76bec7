"""Makes all ranks of a job start from the same checkpoint, before torch.distributed is up.

Rank 0 chooses; the others serve. For each candidate rank 0 publishes an order in the coordination
store, every rank checks its part and publishes what it found, and rank 0 goes on to the next
candidate or publishes the choice. One reader of all findings keeps the traffic linear in ranks.

Promise: either every rank returns the same :class:`Choice`, or every rank that still lives raises
an error of the same kind and words. Every wait is bounded. Only JSON travels, of bounded size.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from megatron.resilience.checkpoint.choose import Choice, choose_checkpoint, has_traces
from megatron.resilience.checkpoint.damage import Damage
from megatron.resilience.checkpoint.settle import settle
from megatron.resilience.checkpoint.verify import Level, Verification, verify_checkpoint
from resihp_ext.errors import ResiHPError, UserError

MOST_DAMAGES_PER_RANK = 20
"""A rank may find thousands (a zeroed disk); the first ones say enough."""
MOST_RANKS_NAMED = 16
_FIRST_POLL_S, _LONGEST_POLL_S = 0.002, 0.1


class AgreementError(ResiHPError):
    """Ranks could not agree in time; the line names those that did not answer."""


class Store(Protocol):
    """What is used of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None:
        """Publish ``value``."""

    def get(self, key: str, /) -> bytes:
        """Read a value that exists."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """Place of this process in the agreement.

    ``store`` must be private to this launch: keys of an earlier attempt would be taken for
    answers. Wrap it in a ``PrefixStore`` that carries the restart count. It should outlive rank 0
    (the launcher hosts it), or the others lose it before they read why rank 0 stopped.
    """

    store: Store
    """The job's coordination store (the launcher's ``TCPStore``)."""
    rank: int
    """Global rank."""
    world_size: int
    """Ranks that take part."""
    timeout_s: float = 600.0
    """Longest wait for a rank after this one has finished its own part."""
    host: str = ""
    """Name for messages; the host name when empty."""

    @property
    def host_name(self) -> str:
        """Host of this rank, for people."""
        return self.host or socket.gethostname()


def agree_on_checkpoint(
    seat: Seat,
    load_directory: Path | str,
    save_directory: Path | str | None,
    *,
    level: Level = "full",
    ckpt_step: int | None = None,
    report: Callable[[str], None] = lambda line: None,
) -> Choice:
    """Choose, verify and settle on one checkpoint together. Collective over all ranks of ``seat``.

    Args:
        seat: this rank's place.
        load_directory: ``--load``; the same on all ranks.
        save_directory: ``--save``; the same on all ranks.
        level: how thoroughly to verify.
        ckpt_step: ``--ckpt-step``.
        report: called on rank 0 only, with one line at a time.

    Raises:
        UserError: nothing sound to load, or ranks see different files. Same on every rank.
        AgreementError: ranks did not answer in time, or the store is gone.
    """
    channel = _Channel(seat)
    if seat.rank == 0:
        leader = _Leader(channel, level, report)
        return leader.run(Path(load_directory), _path(save_directory), ckpt_step)
    return _follow(channel, level)


class _Channel:
    """Keys, bounded waits and JSON over the store."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    def send(self, key: str, message: dict[str, Any]) -> None:
        try:
            self.seat.store.set(key, json.dumps(message))
        except RuntimeError as error:  # torch's DistStoreError and DistNetworkError
            raise self._lost(error) from None

    def receive(self, keys: dict[int, str], timeout_s: float) -> dict[int, dict[str, Any]]:
        """Read ``{rank: key}``; wait until all exist.

        Raises:
            AgreementError: some did not appear in time.
        """
        deadline_s, poll_s = time.monotonic() + timeout_s, _FIRST_POLL_S
        store = self.seat.store
        try:
            while not store.check(list(keys.values())):
                if time.monotonic() > deadline_s:
                    raise self._silent([r for r, key in keys.items() if not store.check([key])])
                time.sleep(poll_s)
                poll_s = min(2 * poll_s, _LONGEST_POLL_S)
            return {rank: json.loads(store.get(key)) for rank, key in keys.items()}
        except RuntimeError as error:
            raise self._lost(error) from None

    def _silent(self, ranks: list[int]) -> AgreementError:
        named = ", ".join(map(str, ranks[:MOST_RANKS_NAMED]))
        more = f" and {len(ranks) - MOST_RANKS_NAMED} more" if len(ranks) > MOST_RANKS_NAMED else ""
        return AgreementError(
            f"checkpoint: rank {named}{more} of {self.seat.world_size} did not answer within "
            f"{self.seat.timeout_s:g} s while a checkpoint was verified (seen from rank "
            f"{self.seat.rank} on {self.seat.host_name}); look at their logs, or raise "
            "--resilience-verify-checkpoint-timeout-s"
        )

    def _lost(self, error: RuntimeError) -> AgreementError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return AgreementError(
            f"checkpoint: rank {self.seat.rank} on {self.seat.host_name} lost the coordination "
            f"store while a checkpoint was verified: {reason[:200]}"
        )


class _Leader:
    """Rank 0: runs the choice, with a verification that all ranks take part in."""

    def __init__(self, channel: _Channel, level: Level, report: Callable[[str], None]) -> None:
        self._channel, self._level, self._report = channel, level, report
        self._round = 0

    def run(self, load: Path, save: Path | None, ckpt_step: int | None) -> Choice:
        line = "checkpoint: rank 0 failed while choosing, see its log"
        closing: dict[str, Any] = {"order": "stop", "line": line}
        try:
            choice = choose_checkpoint(load, save, verify=self._verify, ckpt_step=ckpt_step)
            if choice.directory is None:
                self._require_nothing_elsewhere(load)
            for notice in (*choice.notices, *settle(choice, load, save)):
                self._report(notice)
            closing = {"order": "take", "choice": choice.to_json()}
        except UserError as error:
            closing = {"order": "refuse", "line": str(error)}
            raise
        except AgreementError as error:
            closing = {"order": "stop", "line": str(error)}
            raise
        finally:
            # Whatever happened here, the others must not wait for the full timeout.
            self._channel.send(_order_key(self._round), closing)
        return choice

    def _verify(self, directory: Path) -> Sequence[Damage]:
        started_s = time.monotonic()
        findings = self._ask("verify", directory)
        _require_same_view(findings, directory)
        damages = _merge(findings)
        if not damages and self._level == "full":
            self._report(_summary(findings, directory, time.monotonic() - started_s))
        return damages

    def _require_nothing_elsewhere(self, load: Path) -> None:
        """Fresh weights only if no rank sees a checkpoint that rank 0 does not (a lost mount)."""
        for rank, found in sorted(self._ask("look", load).items()):
            if found.get("visible", True):
                raise UserError(
                    f"--load: rank {rank} ({found['host']}) sees checkpoints in {load} and rank 0 "
                    f"({self._channel.seat.host_name}) does not; use a directory that all nodes "
                    "share"
                )

    def _ask(self, order: str, directory: Path) -> dict[int, dict[str, Any]]:
        """Have every rank, this one included, carry out ``order``; answers by rank."""
        seat = self._channel.seat
        path = os.path.abspath(directory)
        answers = {rank: _answer_key(self._round, rank) for rank in range(1, seat.world_size)}
        self._channel.send(_order_key(self._round), {"order": order, "directory": path})
        self._round += 1  # at once: should this round fail, the others read the next order
        findings = {0: _obey(seat, order, Path(path), self._level)}
        if answers:
            findings |= self._channel.receive(answers, seat.timeout_s)
        for rank, found in sorted(findings.items()):
            if "error" in found:
                raise AgreementError(f"checkpoint: rank {rank} on {found['host']} {found['error']}")
        return findings


def _follow(channel: _Channel, level: Level) -> Choice:
    seat = channel.seat
    for round_number in range(1 << 31):
        # Rank 0 may wait the whole timeout for another rank before it can tell this one.
        key = {0: _order_key(round_number)}
        order = channel.receive(key, 2 * seat.timeout_s + _LONGEST_POLL_S)[0]
        if order["order"] == "take":
            return Choice.from_json(order["choice"])
        if order["order"] == "refuse":
            raise UserError(order["line"])
        if order["order"] == "stop":
            raise AgreementError(order["line"])
        findings: dict[str, Any] = {"host": seat.host_name, "error": "failed, see its log"}
        try:
            findings = _obey(seat, order["order"], Path(order["directory"]), level)
        finally:
            channel.send(_answer_key(round_number, seat.rank), findings)
    raise AssertionError("unreachable: a directory holds fewer checkpoints")


def _obey(seat: Seat, order: str, directory: Path, level: Level) -> dict[str, Any]:
    if order == "look":
        return {"host": seat.host_name, "visible": has_traces(directory)}
    visible = directory.is_dir()
    result: Verification = verify_checkpoint(
        directory, level=level, part=(seat.rank, seat.world_size)
    )
    return {
        "host": seat.host_name,
        "visible": visible,
        "damages": [damage.to_json() for damage in result.damages[:MOST_DAMAGES_PER_RANK]],
        "checked_bytes": result.checked_bytes,
        "unchecked_bytes": result.unchecked_bytes,
    }


def _require_same_view(findings: dict[int, dict[str, Any]], directory: Path) -> None:
    """A directory or file that only some ranks see is no damage: the file system is not shared."""
    first = findings[0]
    for rank, found in sorted(findings.items()):
        subject = None if found["visible"] == first["visible"] else directory
        for damage in found["damages"]:
            path = Path(damage["directory"]) / damage["file"]
            if rank and damage["kind"] == "missing" and path.exists():
                subject = path
        if subject is not None:
            here, there = f"rank 0 ({first['host']})", f"rank {rank} ({found['host']})"
            if not first["visible"]:
                here, there = there, here
            raise UserError(
                f"--load: {subject} exists on {here} but not on {there}; use a directory that all "
                "nodes share"
            )


def _merge(findings: dict[int, dict[str, Any]]) -> tuple[Damage, ...]:
    """Findings of all ranks without repetitions, the most telling kind first, then by file."""
    merged = {
        Damage.from_json(damage): None
        for _, found in sorted(findings.items())
        for damage in found["damages"]
    }
    order = ("missing", "inconsistent", "unreadable", "truncated", "content")
    return tuple(sorted(merged, key=lambda d: (order.index(d.kind), d.file, d.problem)))


def _summary(findings: dict[int, dict[str, Any]], directory: Path, elapsed_s: float) -> str:
    checked_gb = sum(found["checked_bytes"] for found in findings.values()) / 1e9
    unchecked_gb = sum(found["unchecked_bytes"] for found in findings.values()) / 1e9
    line = (
        f"--load: verified {directory}: {checked_gb:.3g} GB in {elapsed_s:.2f} s "
        f"({checked_gb / max(elapsed_s, 1e-9):.2g} GB/s, {len(findings)} ranks)"
    )
    if unchecked_gb > 0:
        line += f"; {unchecked_gb:.3g} GB carry no checksum"
    return line


def _order_key(round_number: int) -> str:
    return f"resihp/checkpoint/{round_number}/order"


def _answer_key(round_number: int, rank: int) -> str:
    return f"resihp/checkpoint/{round_number}/answer/{rank}"


def _path(directory: Path | str | None) -> Path | None:
    return None if directory is None else Path(directory)
