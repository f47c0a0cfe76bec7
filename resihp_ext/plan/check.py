"""What must hold of a program before anything is executed.

Every micro-batch crosses every instance of its route once each way, with the transfers that
the route demands, in its order; every instance ends with SYNC and STEP; nothing deadlocks. An
instance either splits all its backwards (``W`` for each) or none.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from resihp_ext.plan.action import END, RECEIVES, SENDS, Action, Kind
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.grid import grid
from resihp_ext.plan.plan import Instance, Plan, neighbours
from resihp_ext.plan.program import Cell, Program, ProgramError, is_split


def checked(program: Program, plan: Plan) -> Program:
    """Checks the program against its plan and returns it.

    Raises:
        ProgramError: the first thing that is wrong, with the grid around it.
    """
    if program.instances != plan.instances:
        wrong = sorted(set(program.instances) ^ set(plan.instances))
        names = ", ".join(map(str, wrong)) or "in another order"
        raise ProgramError(f"program: its instances are not the plan's: {names}")
    visits: dict[Instance, list[int]] = {instance: [] for instance in plan.instances}
    for micro_batch, route in enumerate(plan.routes):
        for instance in route:
            visits[instance].append(micro_batch)
    for instance in program.instances:
        _check_content(program, plan, instance, visits[instance])
        _check_order(program, plan, instance, visits[instance])
    dry_run(program, lambda _instance, _action: 1.0)
    return program


def chain(plan: Plan, instance: Instance, micro_batch: int, *, split: bool) -> Iterator[Action]:
    """What an instance does with a micro-batch that visits it, in order; ``W`` last."""
    before, after = neighbours(plan.routes[micro_batch], instance)
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
        yield Action(kind=kind, micro_batch=micro_batch, peer=peer)


def _check_content(program: Program, plan: Plan, instance: Instance, visits: Sequence[int]) -> None:
    """Exactly the actions that the routes demand. Both ends of a transfer follow from one route, so
    that each has its other end follows from this."""
    actions = program.actions(instance)
    split = is_split(actions)
    wanted = Counter(END)
    for micro_batch in visits:
        wanted.update(chain(plan, instance, micro_batch, split=split))
    found: Counter[Action] = Counter()
    for index, action in enumerate(actions):
        found[action] += 1
        if found[action] > wanted[action]:
            what = "occurs twice" if wanted[action] else "is not what the routes demand"
            raise _error(program, instance, index, f"{action} {what}")
    if missing := sorted(wanted - found, key=str):
        raise _error(program, instance, len(actions) - 1, f"{missing[0]} is missing")


def _check_order(program: Program, plan: Plan, instance: Instance, visits: Sequence[int]) -> None:
    """Receive, run, send, for each micro-batch; W after B; SYNC and STEP at the end."""
    actions = program.actions(instance)
    at = {action: index for index, action in enumerate(actions)}
    if actions[-2:] != END:
        raise _error(program, instance, at[END[0]], "SYNC and STEP must end the list")
    for micro_batch in visits:
        last = -1
        for action in chain(plan, instance, micro_batch, split=False):
            if at[action] < last:
                raise _error(program, instance, at[action], f"{action} comes too early")
            last = at[action]
        backward = Action(kind=Kind.BACKWARD, micro_batch=micro_batch)
        weight = Action(kind=Kind.WEIGHT, micro_batch=micro_batch)
        if at.get(weight, len(actions)) < at[backward]:
            raise _error(program, instance, at[weight], f"{weight} comes before {backward}")


def _error(program: Program, instance: Instance, index: int, what: str) -> ProgramError:
    cell = Cell(instance=instance, index=index)
    return ProgramError(f"program: {instance}, action {index}: {what}\n{grid(program, {cell})}")
