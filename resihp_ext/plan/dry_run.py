"""Walks a program on a clock without running it: finds deadlocks, gives the makespan and the peak
of micro-batches in flight.

Sends do not block their sender; a receive waits for its send; SYNC and STEP wait for everyone. A
program that passes needs buffers for what was sent and not yet received, and nothing else.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from resihp_ext.plan.action import COMPUTE, RECEIVES, SENDS, Action, Kind
from resihp_ext.plan.grid import grid
from resihp_ext.plan.plan import Instance
from resihp_ext.plan.program import Cell, Message, Program, ProgramError, is_split

Cost = Callable[[Instance, Action], float]
"""Seconds (or any unit) that an action keeps its ranks busy; for a send, until it arrives.

The instance is the one that the action is for: of several chunks on the same ranks, that one; for
SYNC and STEP the host, the lowest.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """When an action ran, in the unit of the costs."""

    cell: Cell
    action: Action
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """All actions of a program, in the order in which they could start."""

    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """When the last action ends."""
        return max((span.end for span in self.spans), default=0.0)

    def idle_ratio(self, instance: Instance) -> float:
        """Part of the makespan in which the ranks of a host compute nothing: its bubble."""
        mine = [s for s in self.spans if s.cell.instance == instance and s.action.kind in COMPUTE]
        return 1.0 - sum(span.end - span.start for span in mine) / self.makespan


def dry_run(program: Program, cost: Cost) -> Timeline:
    """Walks the program.

    Raises:
        ProgramError: a deadlock; the grid marks the actions that wait for ever.
    """
    walk = _Walk(program, cost)
    walk.run()
    if stuck := walk.stuck():
        waits = "; ".join(f"{cell.instance} waits at {action}" for cell, action in stuck)
        raise ProgramError(f"deadlock: {waits}\n{grid(program, {cell for cell, _ in stuck})}")
    return Timeline(spans=tuple(walk.spans))


def peak_in_flight(program: Program, instance: Instance) -> int:
    """Most activations that the ranks of a host hold at once, counted once for each chunk: run
    forward, and not yet backward (with a split backward, not yet ``W``). A program without
    backwards holds none beyond the one that is run."""
    actions = program.actions(instance)
    kinds = {action.kind for action in actions}
    last = Kind.WEIGHT if is_split(actions) else Kind.BACKWARD
    if last not in kinds:
        return int(Kind.FORWARD in kinds)
    now = peak = 0
    for action in actions:
        now += (action.kind is Kind.FORWARD) - (action.kind is last)
        peak = max(peak, now)
    return peak


class _Walk:
    def __init__(self, program: Program, cost: Cost) -> None:
        self._program = program
        self._lists = dict(program.lists)
        self._cost = cost
        self._next = dict.fromkeys(self._lists, 0)
        self._free_at = dict.fromkeys(self._lists, 0.0)
        self._arrivals: dict[Message, float] = {}
        self.spans: list[Span] = []

    def run(self) -> None:
        """Advances every host as far as it goes, until none can."""
        moved = True
        while moved:
            moved = False
            for instance in self._lists:
                moved |= self._advance(instance)
            moved |= self._meet()

    def stuck(self) -> list[tuple[Cell, Action]]:
        """What every host that has not come to its end waits at."""
        return [
            (Cell(instance=instance, index=self._next[instance]), actions[self._next[instance]])
            for instance, actions in self._lists.items()
            if self._next[instance] < len(actions)
        ]

    def _advance(self, instance: Instance) -> bool:
        actions, begun = self._lists[instance], self._next[instance]
        while self._next[instance] < len(actions):
            action = actions[self._next[instance]]
            start = self._free_at[instance]
            if action.kind in (Kind.SYNC, Kind.STEP):
                break
            if action.kind in RECEIVES:
                message = self._program.message(instance, action)
                if message not in self._arrivals:
                    break
                start = max(start, self._arrivals.pop(message))
            self._record(instance, action, start)
        return self._next[instance] > begun

    def _record(self, instance: Instance, action: Action, start: float) -> None:
        end = start + self._cost(self._program.target(instance, action), action)
        if action.kind in SENDS:
            self._arrivals[self._program.message(instance, action)] = end
        else:
            self._free_at[instance] = end
        cell = Cell(instance=instance, index=self._next[instance])
        self.spans.append(Span(cell=cell, action=action, start=start, end=end))
        self._next[instance] += 1

    def _meet(self) -> bool:
        """Lets SYNC or STEP happen once every host has come to it."""
        waiting = {
            actions[self._next[instance]].kind if self._next[instance] < len(actions) else None
            for instance, actions in self._lists.items()
        }
        if waiting not in ({Kind.SYNC}, {Kind.STEP}):
            return False
        start = max(self._free_at.values())
        for instance, actions in self._lists.items():
            self._record(instance, actions[self._next[instance]], start)
        return True
