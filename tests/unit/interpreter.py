"""Runs a program on tokens instead of tensors, through channels that know no names, only order.

An independent judge of what ``checked`` promises: it shares no code with it, and it decides by what
happens. A token is (direction, micro-batch, instance): this has come to that place.
"""

from __future__ import annotations

from collections import Counter, deque
from itertools import pairwise

from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.plan import Instance, Plan
from resihp_ext.plan.program import Program

Token = tuple[str, int, Instance]


class RefusedError(Exception):
    """The program cannot be run, or does not do its work."""


def interpret(program: Program, plan: Plan, *, forward_only: bool = False) -> None:
    """Runs a program to its end.

    Raises:
        RefusedError: something is missing, out of order, left over, or waits for ever.
    """
    _Interpreter(program, plan, forward_only).run()


class _Interpreter:
    def __init__(self, program: Program, plan: Plan, forward_only: bool) -> None:
        self._plan, self._forward_only = plan, forward_only
        self._todo = {host: deque(actions) for host, actions in program.lists}
        self._splits = {
            host: any(action.kind is Kind.WEIGHT for action in actions)
            for host, actions in program.lists
        }
        self._ranks = {i: (i.replica, plan.stage(i).ranks) for i in plan.instances}
        self._next = {
            (m, one): other for m, route in enumerate(plan.routes) for one, other in pairwise(route)
        }
        self._last = {
            (m, other): one for m, route in enumerate(plan.routes) for one, other in pairwise(route)
        }
        self._tokens = Counter[Token](("in F", m, route[0]) for m, route in enumerate(plan.routes))
        self._channels: dict[object, deque[Token]] = {}
        self._done = Counter[tuple[Kind, int, Instance]]()
        self._barriers: list[Kind] = []

    def run(self) -> None:
        while any(self._todo.values()):
            moved = [self._advance(host) for host in self._todo]
            if not any(moved):
                self._barrier()
        wanted = Counter(
            (kind, m, instance)
            for m, route in enumerate(self._plan.routes)
            for instance in route
            for kind in (Kind.FORWARD, Kind.BACKWARD)[: 1 if self._forward_only else 2]
        )
        barriers = [] if self._forward_only else [Kind.SYNC, Kind.STEP]
        complete = self._done == wanted and self._barriers == barriers
        if not complete or +self._tokens or any(self._channels.values()):
            raise RefusedError("work is missing or left over")

    def _barrier(self) -> None:
        """SYNC and STEP wait for everyone."""
        heads = {todo[0].kind if todo else None for todo in self._todo.values()}
        if heads not in ({Kind.SYNC}, {Kind.STEP}):
            raise RefusedError(f"waits for ever: {heads}")
        self._barriers += [todo.popleft().kind for todo in self._todo.values()][:1]

    def _advance(self, host: Instance) -> bool:
        todo, moved = self._todo[host], False
        while todo and todo[0].kind not in (Kind.SYNC, Kind.STEP) and self._do(host, todo[0]):
            if self._barriers:
                raise RefusedError(f"{todo[0]} after SYNC")
            todo.popleft()
            moved = True
        return moved

    def _do(self, host: Instance, action: Action) -> bool:
        """Does an action; False: it has to wait."""
        mine = [i for i in self._plan.instances if self._ranks[i] == self._ranks[host]]
        if action.chunk >= len(mine) or action.micro_batch >= len(self._plan.routes):
            raise RefusedError(f"{action} is for nobody")
        here, m, kind = mine[action.chunk], action.micro_batch, action.kind
        if kind is Kind.FORWARD:
            self._compute(kind, m, here, "F", self._next)
        elif kind is Kind.BACKWARD:
            self._take(("ran", m, here))
            self._compute(kind, m, here, "B", self._last)
            if self._splits[host]:
                self._tokens["in W", m, here] += 1
        elif kind is Kind.WEIGHT:
            self._take(("in W", m, here))
        else:
            return self._transfer(action, here)
        return True

    def _compute(
        self, kind: Kind, m: int, here: Instance, way: str, to: dict[tuple[int, Instance], Instance]
    ) -> None:
        self._take((f"in {way}", m, here))
        self._done[kind, m, here] += 1
        there = to.get((m, here))
        if way == "F" and not self._forward_only:
            self._tokens["ran", m, here] += 1
            if there is None:  # the loss
                self._tokens["in B", m, here] += 1
        if there is not None:
            local = self._ranks[there] == self._ranks[here]
            self._tokens[(f"in {way}", m, there) if local else (f"out {way}", m, here)] += 1

    def _transfer(self, action: Action, here: Instance) -> bool:
        verb, way = action.kind.value
        m, peer = action.micro_batch, action.peer
        if peer not in self._ranks:
            raise RefusedError(f"{action}: nobody is there")
        to = self._next if way == "F" else self._last
        source, target = (here, peer) if verb == "S" else (peer, here)
        if to.get((m, source)) != target:
            raise RefusedError(f"{action} is not on the route")
        channel = self._channels.setdefault((self._ranks[source], self._ranks[target]), deque())
        if verb == "S":
            self._take((f"out {way}", m, here))
            channel.append((f"in {way}", m, target))
        elif not channel:
            return False
        elif (token := channel.popleft()) != (f"in {way}", m, target):
            raise RefusedError(f"{action} gets {token}")
        else:
            self._tokens[token] += 1
        return True

    def _take(self, token: Token) -> None:
        if not self._tokens[token]:
            raise RefusedError(f"{token} is not there")
        self._tokens[token] -= 1
