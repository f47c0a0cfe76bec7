"""The Program: for every stage instance of a plan, the ordered list of its actions in one step.

The same object is executed, predicted and simulated. Its text form has a line for each instance
and round-trips.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.plan import Instance, PlanError


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Cell:
    """A place in a program: an action of an instance."""

    instance: Instance
    index: int


def is_split(actions: Iterable[Action]) -> bool:
    """Whether an instance gives the gradients of its weights apart from those of its inputs."""
    return any(action.kind is Kind.WEIGHT for action in actions)


class ProgramError(PlanError):
    """A program that cannot be executed; names the cell, and shows the grid with it marked."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """What each instance does, in order; all ranks of an instance do the same."""

    lists: tuple[tuple[Instance, tuple[Action, ...]], ...]
    """Instances in ascending order, each with its actions."""

    @property
    def instances(self) -> tuple[Instance, ...]:
        """All instances that do anything."""
        return tuple(instance for instance, _ in self.lists)

    def actions(self, instance: Instance) -> tuple[Action, ...]:
        """Actions of one instance; none for one that is not in the program."""
        return self._by_instance.get(instance, ())

    @cached_property
    def _by_instance(self) -> dict[Instance, tuple[Action, ...]]:
        return dict(self.lists)

    def cells(self) -> Iterator[tuple[Cell, Action]]:
        """Every cell with its action, instance after instance."""
        for instance, actions in self.lists:
            for index, action in enumerate(actions):
                yield Cell(instance=instance, index=index), action

    def to_text(self) -> str:
        """One line an instance: ``1.0: F0 SF0>1.1 ...``."""
        return "".join(
            f"{instance}: {' '.join(map(str, actions))}\n" for instance, actions in self.lists
        )

    @classmethod
    def from_text(cls, text: str) -> Self:
        """Inverse of :meth:`to_text`.

        Raises:
            PlanError: not the text of a program; names the line.
        """
        lists: dict[Instance, tuple[Action, ...]] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                place, words = line.split(":")
                replica, stage = map(int, place.split("."))
                instance = Instance(replica=replica, stage=stage)
                actions = tuple(map(Action.parse, words.split()))
            except ValueError as error:
                raise PlanError(f"program, line {number}: {error}") from error
            if instance in lists:
                raise PlanError(f"program, line {number}: {place} has a line already")
            lists[instance] = actions
        return cls(lists=tuple(sorted(lists.items())))
