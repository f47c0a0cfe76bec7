"""What must hold of a program before anything is executed.

Every micro-batch crosses every instance of its route once each way, with the transfers that
the route demands, in its order; every group ends with SYNC and STEP; nothing deadlocks; messages
are received in the order in which they are sent. A group either splits all its backwards (``W`` for
each) or none. The program of an evaluation only crosses forward.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import pairwise

from resihp_ext.plan.action import END, RECEIVES, SENDS, Action, Kind
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.fifo import out_of_order
from resihp_ext.plan.grid import grid
from resihp_ext.plan.plan import Instance, Plan, neighbours
from resihp_ext.plan.program import Cell, Program, ProgramError, is_split

_ONLY_BACKWARD = (Kind.RECV_BACKWARD, Kind.BACKWARD, Kind.SEND_BACKWARD, Kind.WEIGHT)


def checked(program: Program, plan: Plan, *, forward_only: bool = False) -> Program:
    """Checks the program against its plan and returns it.

    Args:
        program: Of a training step; with ``forward_only`` of an evaluation.
        plan: A valid plan.
        forward_only: Whether backwards, SYNC and STEP must be absent.

    Raises:
        ProgramError: the first thing that is wrong, with the grid around it.
    """
    if program.instances != plan.hosts:
        wrong = sorted(set(program.instances) ^ set(plan.hosts))
        names = ", ".join(map(str, wrong)) or "in another order"
        raise ProgramError(f"program: its instances are not the plan's: {names}")
    for host in plan.hosts:
        if program.chunks(host) != plan.chunks(host):
            there = "+".join(map(str, plan.chunks(host)))
            raise ProgramError(f"program: {program.head(host)}: the chunks of the plan are {there}")
    visits: dict[Instance, list[tuple[int, Instance]]] = {host: [] for host in plan.hosts}
    for micro_batch, route in enumerate(plan.routes):
        for instance in route:
            visits[plan.host_of(instance)].append((micro_batch, instance))
    for host in plan.hosts:
        _Check(program, plan, host, visits[host], forward_only).run()
    dry_run(program, lambda _instance, _action: 1.0)
    if found := out_of_order(program):
        cell, turn = found
        due = f"{turn.kind}{turn.micro_batch} from {turn.source} to {turn.target}"
        what = f"out of order: what belongs to {due} was sent before"
        raise _error(program, cell, f"{program.actions(cell.instance)[cell.index]}: {what}")
    return program


def chain(
    plan: Plan, instance: Instance, micro_batch: int, *, split: bool, forward_only: bool = False
) -> Iterator[Action]:
    """What is done at an instance with a micro-batch that visits it, in order; ``W`` last.

    To and from an instance on the same ranks nothing is sent.
    """
    before, after = plan.links(micro_batch, instance)
    chunk = plan.chunks(instance).index(instance)
    for kind, peer in (
        (Kind.RECV_FORWARD, before),
        (Kind.FORWARD, None),
        (Kind.SEND_FORWARD, after),
        (Kind.RECV_BACKWARD, after),
        (Kind.BACKWARD, None),
        (Kind.SEND_BACKWARD, before),
        (Kind.WEIGHT, None),
    ):
        moves = kind in SENDS or kind in RECEIVES
        if (moves and peer is None) or (kind is Kind.WEIGHT and not split):
            continue
        if not (forward_only and kind in _ONLY_BACKWARD):
            yield Action(kind=kind, micro_batch=micro_batch, peer=peer, chunk=chunk)


class _Check:
    """Checks the list of one host."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        host: Instance,
        visits: Iterable[tuple[int, Instance]],
        forward_only: bool,
    ) -> None:
        self._program, self._plan, self._host = program, plan, host
        self._actions = program.actions(host)
        self._split = is_split(self._actions)
        self._visits = visits
        self._forward_only = forward_only
        self._end = () if forward_only else END

    def run(self) -> None:
        self._check_content()
        self._check_order()

    def _chain(self, micro_batch: int, instance: Instance) -> list[Action]:
        return list(
            chain(
                self._plan,
                instance,
                micro_batch,
                split=self._split,
                forward_only=self._forward_only,
            )
        )

    def _check_content(self) -> None:
        """Exactly the actions that the routes demand. Both ends of a transfer follow from one
        route, so that each has its other end follows from this."""
        wanted = Counter(self._end)
        for micro_batch, instance in self._visits:
            wanted.update(self._chain(micro_batch, instance))
        found: Counter[Action] = Counter()
        for index, action in enumerate(self._actions):
            found[action] += 1
            if found[action] > wanted[action]:
                what = "occurs twice" if wanted[action] else "is not what the routes demand"
                raise self._error(index, f"{action} {what}")
        if missing := sorted(wanted - found, key=str):
            raise self._error(max(0, len(self._actions) - 1), f"{missing[0]} is missing")

    def _check_order(self) -> None:
        """Receive, run, send, for each visit; W after B; chunk after chunk; the end at the end."""
        at = {action: index for index, action in enumerate(self._actions)}
        if self._end and self._actions[-2:] != self._end:
            raise self._error(at[self._end[0]], "SYNC and STEP must end the list")
        for micro_batch, instance in self._visits:
            for one, other in self._pairs(micro_batch, instance):
                if at[other] < at[one]:
                    raise self._error(at[other], f"{other} comes too early: before {one}")

    def _pairs(self, micro_batch: int, instance: Instance) -> Iterator[tuple[Action, Action]]:
        """What must come in which order around one visit."""
        mine = {action.kind: action for action in self._chain(micro_batch, instance)}
        yield from pairwise(action for kind, action in mine.items() if kind is not Kind.WEIGHT)
        if Kind.WEIGHT in mine:
            yield mine[Kind.BACKWARD], mine[Kind.WEIGHT]
        _, after = neighbours(self._plan.routes[micro_batch], instance)
        if after in self._plan.chunks(instance):
            theirs = {action.kind: action for action in self._chain(micro_batch, after)}
            yield mine[Kind.FORWARD], theirs[Kind.FORWARD]
            if not self._forward_only:
                yield theirs[Kind.BACKWARD], mine[Kind.BACKWARD]

    def _error(self, index: int, what: str) -> ProgramError:
        return _error(self._program, Cell(instance=self._host, index=index), what)


def _error(program: Program, cell: Cell, what: str) -> ProgramError:
    place = f"program: {cell.instance}, action {cell.index}"
    return ProgramError(f"{place}: {what}\n{grid(program, {cell})}")
