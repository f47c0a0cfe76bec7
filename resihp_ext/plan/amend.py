"""Changes a program that runs already: one micro-batch passes one stage in another replica.

Only the instances that the micro-batch leaves and enters, and its neighbours before and after, do
anything else than before. What a rank group has begun stays as it is: an amended list begins with
the same actions up to the group's *hold*, the first place at which it differs. A group that has not
passed its hold can go over from one program to the other at any moment, alone.

The visit is inserted where the step ends first, of a few places: with the rest of the list as it
is, or in the order of 1F1B. Every amended program has passed the check that new ones pass, and
holds no more activations at once than new ones may.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from resihp_ext.plan.action import SENDS, Action, Kind
from resihp_ext.plan.check import chain, checked
from resihp_ext.plan.clock import room_of
from resihp_ext.plan.dry_run import dry_run, peak_in_flight
from resihp_ext.plan.fifo import received_in_order
from resihp_ext.plan.plan import Instance, Plan, PlanError, neighbours
from resihp_ext.plan.program import Program, ProgramError, is_split

PLACES = 4
"""Places of a list that are tried for one visit."""

Begun = Mapping[Instance, int]
"""How many actions each host has begun, or may have begun until it hears of a change."""
Makespan = Callable[[Program], float]
"""Time of a step, by which candidates are compared."""
_Order = list[tuple[Kind, int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A micro-batch passes a stage at ``target`` in place of ``source``."""

    micro_batch: int
    source: Instance
    target: Instance

    def __str__(self) -> str:
        return f"micro-batch {self.micro_batch} from {self.source} to {self.target}"


@dataclass(frozen=True, kw_only=True)
class Amended:
    """A program after a move, with its plan."""

    plan: Plan
    """The same but for one route."""
    program: Program
    before: Program

    @cached_property
    def holds(self) -> dict[Instance, int]:
        """For every host whose list differs: the first action that does."""
        return {
            host: hold
            for host, actions in self.program.lists
            if (hold := differs_at(self.before.actions(host), actions)) is not None
        }


def differs_at(one: tuple[Action, ...], other: tuple[Action, ...]) -> int | None:
    """The first place at which two lists differ; None: nowhere."""
    if one == other:
        return None
    return next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


def rerouted(plan: Plan, move: Move) -> Plan:
    """The plan with the route of the move.

    Raises:
        PlanError: the micro-batch does not pass there, the instances hold different layers, or
            ranks involved hold several chunks, whose turns would change with it.
    """
    route = plan.routes[move.micro_batch]
    if move.source not in route or move.target in route:
        raise PlanError(f"{move}: its route is {' '.join(map(str, route))}")
    if plan.stage(move.source).layers != plan.stage(move.target).layers:
        raise PlanError(f"{move}: the layers there are others")
    around = neighbours(route, move.source)
    if any(len(plan.chunks(one)) > 1 for one in (move.source, move.target, *around) if one):
        raise PlanError(f"{move}: ranks that hold several chunks take no part")
    way = tuple(move.target if one == move.source else one for one in route)
    routes = (*plan.routes[: move.micro_batch], way, *plan.routes[move.micro_batch + 1 :])
    return replace(plan, routes=routes)


def amended(
    program: Program,
    plan: Plan,
    move: Move,
    begun: Begun,
    makespan: Makespan,
    *,
    below: float = inf,
) -> Amended | None:
    """The fastest program after a move; None if the move comes too late, or is not worth it.

    Args:
        program: Of a training step; valid for the plan.
        below: How fast it must be.

    Raises:
        PlanError: see :func:`rerouted`.
    """
    after = rerouted(plan, move)
    if is_split(program.actions(move.source)) or is_split(program.actions(move.target)):
        return None
    room = room_of(after)[move.target]
    found: list[tuple[float, int, Amended]] = []
    for target in _candidates(program, after, move, begun.get(move.target, 0), room):
        one = Amended(plan=after, program=_program(program, plan, move, target), before=program)
        if peak_in_flight(one.program, move.target) > room or not _is_in_time(one, begun):
            continue
        try:
            took = makespan(one.program)
        except ProgramError:
            continue  # deadlocks, in this order
        if took < below:
            found.append((took, len(found), one))
    for _, _, one in sorted(found):
        try:
            checked(one.program, after)
        except ProgramError:
            continue
        return one
    return None


def _is_in_time(found: Amended, begun: Begun) -> bool:
    return all(hold >= begun.get(host, 0) for host, hold in found.holds.items())


def _program(program: Program, plan: Plan, move: Move, target: tuple[Action, ...]) -> Program:
    around = neighbours(plan.routes[move.micro_batch], move.source)

    def list_of(host: Instance, actions: tuple[Action, ...]) -> tuple[Action, ...]:
        if host == move.target:
            return target
        if host == move.source:
            return tuple(one for one in actions if one.micro_batch != move.micro_batch)
        if host not in around:
            return actions
        old = move.micro_batch, move.source
        return tuple(
            replace(one, peer=move.target) if (one.micro_batch, one.peer) == old else one
            for one in actions
        )

    lists = tuple((host, list_of(host, actions)) for host, actions in program.lists)
    return received_in_order(replace(program, lists=lists))


def _candidates(
    program: Program, after: Plan, move: Move, begun: int, room: int
) -> Iterator[tuple[Action, ...]]:
    """Lists of the target with the visit in them."""
    actions = program.actions(move.target)
    # Between a computation and its send there is nothing to insert.
    while begun < len(actions) and actions[begun].kind in SENDS:
        begun += 1
    kept, rest = actions[:begun], actions[begun:]
    tail = tuple(one for one in rest if one.micro_batch < 0)
    order: _Order = [
        (a.kind, a.micro_batch) for a in rest if a.kind in (Kind.FORWARD, Kind.BACKWARD)
    ]
    forwards = [number for kind, number in order if kind is Kind.FORWARD]
    held = sum((a.kind is Kind.FORWARD) - (a.kind is Kind.BACKWARD) for a in kept)
    seen: set[tuple[tuple[Kind, int], ...]] = set()
    for place in _places(forwards, move.micro_batch):
        following = forwards[place] if place < len(forwards) else None
        inserted = _inserted(order, move.micro_batch, following)
        for way in (inserted, _in_turn(inserted, held, room)):
            if tuple(way) not in seen:
                seen.add(tuple(way))
                yield (*kept, *_with_transfers(way, after, move.target, kept), *tail)


def _places(forwards: list[int], micro_batch: int) -> list[int]:
    """Where to insert among what is still to begin: in turn, last, and some places between."""
    turn = next((k for k, one in enumerate(forwards) if one > micro_batch), len(forwards))
    last = len(forwards)
    spread = [last * k // PLACES for k in range(PLACES, 0, -1)]
    return list(dict.fromkeys([turn, *spread]))[:PLACES]


def _inserted(order: _Order, micro_batch: int, following: int | None) -> _Order:
    """Forward and backward each right before those of another micro-batch, or last."""
    found: _Order = []
    for kind, number in order:
        if number == following:
            found.append((kind, micro_batch))
        found.append((kind, number))
    if following is None:
        forward = max((k for k, one in enumerate(found) if one[0] is Kind.FORWARD), default=-1) + 1
        # One backward later there is room for it wherever a list runs out of forwards.
        if forward < len(found):
            forward += 1
        found.insert(forward, (Kind.FORWARD, micro_batch))
        found.append((Kind.BACKWARD, micro_batch))
    return found


def _in_turn(order: _Order, held: int, room: int) -> _Order:
    """The same forwards and the same backwards, one after one: forwards while there is room."""
    forwards = [one for one in order if one[0] is Kind.FORWARD][::-1]
    backwards = [one for one in order if one[0] is Kind.BACKWARD][::-1]
    found: _Order = []
    while forwards or backwards:
        if forwards and held < room:
            found.append(forwards.pop())
            held += 1
        elif backwards:
            found.append(backwards.pop())
            held -= 1
        else:
            return order
    return found


def _with_transfers(
    order: _Order, plan: Plan, target: Instance, kept: tuple[Action, ...]
) -> Iterator[Action]:
    done = set(kept)
    around = {
        Kind.FORWARD: (Kind.RECV_FORWARD, Kind.FORWARD, Kind.SEND_FORWARD),
        Kind.BACKWARD: (Kind.RECV_BACKWARD, Kind.BACKWARD, Kind.SEND_BACKWARD),
    }
    for kind, micro_batch in order:
        for action in chain(plan, target, micro_batch, split=False):
            if action.kind in around[kind] and action not in done:
                yield action


def step_time(cost: Callable[[Instance, Kind], float]) -> Makespan:
    """Compares programs by the seconds of their computations alone."""

    def makespan(program: Program) -> float:
        return dry_run(
            program,
            lambda one, action: (
                cost(one, action.kind) if action.kind in (Kind.FORWARD, Kind.BACKWARD) else 0.0
            ),
        ).makespan

    return makespan
