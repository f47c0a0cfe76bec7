"""The Program: for every rank group of a plan, the ordered list of its actions in one step.

A group is named by its host, the lowest instance on its ranks. The same object is executed,
predicted and simulated. Its text form has a line for each group and round-trips.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from resihp_ext.plan.action import SENDS, Action, Kind
from resihp_ext.plan.plan import Instance, PlanError


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Cell:
    """A place in a program: an action of a host."""

    instance: Instance
    index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """What a send and its receive have in common."""

    kind: Kind
    """Of the receive."""
    micro_batch: int
    source: Instance
    """The instance, not the host: a micro-batch may pass between two hosts more than once."""
    target: Instance


def is_split(actions: Iterable[Action]) -> bool:
    """Whether a group gives the gradients of its weights apart from those of its inputs."""
    return any(action.kind is Kind.WEIGHT for action in actions)


class ProgramError(PlanError):
    """A program that cannot be executed; names the cell, and shows the grid with it marked."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What each rank group does, in order; all its ranks do the same."""

    lists: tuple[tuple[Instance, tuple[Action, ...]], ...]
    """Hosts in ascending order, each with the actions of all its chunks."""
    chunked: tuple[tuple[Instance, ...], ...] = ()
    """The chunks of every group that holds more than one, host first; ascending."""

    @property
    def instances(self) -> tuple[Instance, ...]:
        """The hosts: without virtual stages, all instances that do anything."""
        return tuple(instance for instance, _ in self.lists)

    def actions(self, instance: Instance) -> tuple[Action, ...]:
        """Actions of one host; none for an instance that is not one."""
        return self._by_host.get(instance, ())

    def chunks(self, host: Instance) -> tuple[Instance, ...]:
        """The instances on the ranks of a host, in the order of their layers."""
        return self._chunks_of.get(host, (host,))

    def target(self, host: Instance, action: Action) -> Instance:
        """The instance that an action of a host is for; the host itself for SYNC and STEP.

        Raises:
            ProgramError: the host has no such chunk.
        """
        chunks = self.chunks(host)
        if action.chunk >= len(chunks):
            raise ProgramError(f"program: {host}: {action} is for a chunk that is not there")
        return chunks[action.chunk]

    def message(self, host: Instance, transfer: Action) -> Message:
        """What a send or receive of a host moves."""
        here, there = self.target(host, transfer), transfer.peer
        if there is None:
            raise ProgramError(f"program: {host}: {transfer} moves nothing")
        receive = SENDS.get(transfer.kind)
        source, target = (here, there) if receive else (there, here)
        return Message(
            kind=receive or transfer.kind,
            micro_batch=transfer.micro_batch,
            source=source,
            target=target,
        )

    def host_of(self, instance: Instance) -> Instance:
        """The host on whose ranks an instance is."""
        return self._host_of.get(instance, instance)

    @cached_property
    def _by_host(self) -> dict[Instance, tuple[Action, ...]]:
        return dict(self.lists)

    @cached_property
    def _chunks_of(self) -> dict[Instance, tuple[Instance, ...]]:
        return {group[0]: group for group in self.chunked}

    @cached_property
    def _host_of(self) -> dict[Instance, Instance]:
        return {instance: group[0] for group in self.chunked for instance in group}

    def cells(self) -> Iterator[tuple[Cell, Action]]:
        """Every cell with its action, host after host."""
        for instance, actions in self.lists:
            for index, action in enumerate(actions):
                yield Cell(instance=instance, index=index), action

    def head(self, host: Instance) -> str:
        """How a line of the text form begins: ``1.0``, or ``1.0+1.4`` for two chunks."""
        return "+".join(map(str, self.chunks(host)))

    def to_text(self) -> str:
        """One line a group: ``1.0+1.4: F0 SF0>1.1 ...``."""
        return "".join(
            f"{self.head(host)}: {' '.join(map(str, actions))}\n" for host, actions in self.lists
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Inverse of :meth:`to_text`.

        Raises:
            PlanError: not the text of a program; names the line.
        """
        lists: dict[Instance, tuple[Action, ...]] = {}
        groups: list[tuple[Instance, ...]] = []
        seen: set[Instance] = set()
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                head, words = line.split(":")
                group = tuple(map(_instance, head.split("+")))
                actions = tuple(map(Action.parse, words.split()))
            except (ValueError, PlanError) as error:
                raise PlanError(f"program, line {number}: {error}") from error
            if seen & set(group) or len(set(group)) != len(group):
                raise PlanError(f"program, line {number}: {head} has a line already")
            seen |= set(group)
            lists[group[0]] = actions
            groups += [group] * (len(group) > 1)
        return cls(lists=tuple(sorted(lists.items())), chunked=tuple(sorted(groups)))


def _instance(text: str) -> Instance:
    replica, stage = map(int, text.split("."))
    return Instance(replica=replica, stage=stage)
