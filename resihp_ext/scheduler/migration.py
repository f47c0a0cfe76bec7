"""Moves work while a step runs: the paper's Algorithm 1 on programs that have begun.

:mod:`resihp_ext.scheduler.migrate` plays the same idea before a step, with times that are known.
Here all that is known is how far each instance has come and how long its micro-batches took. When
at some stage the front runner is more than ``delta`` micro-batches ahead of the slowest, one that
the slowest has not begun moves to the instance that would be done with it first, if that instance
is faster, and if the step would end earlier by the times so far. Progress alone would move too
much: replicas differ in it for the length of their warm-ups, and a stage lags when another one of
its replica is slow.

Pure: the caller collects progress and carries the amended program out.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resihp_ext.plan.action import Kind
from resihp_ext.plan.amend import Amended, Move, amended, step_time
from resihp_ext.plan.plan import Instance, Plan
from resihp_ext.plan.program import Program

GAIN = 0.01
"""Part of a step that a move must save: what it is judged by are means of a few times."""
FASTER = 1.1
"""How many times as fast an instance must be to be given work: less may be chance."""
TRIES = 3
"""Micro-batches that are tried, the last first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How far a host has come in a step."""

    begun: int = 0
    """Actions of its list that it has begun."""
    forwards: int = 0
    """Finished."""
    backwards: int = 0
    """Finished: micro-batches that it is done with."""
    forward_s: float = 0.0
    """All finished forwards together."""
    backward_s: float = 0.0

    def each_s(self, kind: Kind) -> float | None:
        """Mean time of a forward or backward so far; None: there was none."""
        forward = kind is Kind.FORWARD
        count = self.forwards if forward else self.backwards
        return (self.forward_s if forward else self.backward_s) / count if count else None

    @property
    def micro_batch_s(self) -> float | None:
        """Both together."""
        forward_s, backward_s = self.each_s(Kind.FORWARD), self.each_s(Kind.BACKWARD)
        return None if forward_s is None or backward_s is None else forward_s + backward_s


Board = Mapping[Instance, Progress]
"""Progress of every host; who has told nothing is missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """A move that is worth it."""

    move: Move
    amended: Amended
    saves_s: float
    """By the times so far."""


def decide(
    program: Program,
    plan: Plan,
    board: Board,
    delta: int,
    *,
    near: Instance | None = None,
    lead: int = 0,
) -> Decision | None:
    """Which pending micro-batch moves where, if any.

    Args:
        program: What runs, with all earlier moves.
        plan: Of that program.
        board: Progress.
        delta: Largest gap in finished micro-batches that is tolerated; at least 1.
        near: Looks only at this instance's stage. Default: at all stages, the widest gap first.
        lead: Actions that a host may begin until it hears of a move.
    """
    stages = _stages(plan)
    if near is not None:
        stages = [stage for stage in stages if near in stage]
    gaps = sorted((_gap(stage, board), k) for k, stage in enumerate(stages))
    for gap, k in reversed(gaps):
        if gap <= delta:
            return None
        found = _of_stage(stages[k], program, plan, board, delta, lead)
        if found is not None:
            return found
    return None


def pending(program: Program, host: Instance, begun: int) -> tuple[int, ...]:
    """Micro-batches whose forwards, and whose receives, a host has not begun; in its order."""
    actions = program.actions(host)
    received = {one.micro_batch for one in actions[:begun] if one.kind is Kind.RECV_FORWARD}
    return tuple(
        one.micro_batch
        for one in actions[begun:]
        if one.kind is Kind.FORWARD and one.micro_batch not in received
    )


def _stages(plan: Plan) -> list[list[Instance]]:
    """Instances with the same layers, on ranks that hold nothing else; two or more."""
    found: dict[tuple[int, int], list[Instance]] = {}
    for one in plan.hosts:
        if len(plan.chunks(one)) == 1:
            found.setdefault(plan.stage(one).layers, []).append(one)
    return [stage for stage in found.values() if len(stage) > 1]


def _gap(stage: list[Instance], board: Board) -> int:
    done = [board[one].backwards for one in stage if one in board]
    return max(done) - min(done) if len(done) == len(stage) else 0


def _of_stage(
    stage: list[Instance],
    program: Program,
    plan: Plan,
    board: Board,
    delta: int,
    lead: int,
) -> Decision | None:
    begun = {host: board[host].begun + lead if host in board else 0 for host in program.instances}
    left = {one: pending(program, one, begun[one]) for one in stage}
    lagging = [one for one in stage if left[one]]
    each_s = {one: board[one].micro_batch_s for one in stage}
    if not lagging:
        return None
    most = max(board[one].backwards for one in stage)
    slowest = min(lagging, key=lambda one: (board[one].backwards, -len(left[one]), one))
    slow_s = each_s[slowest]
    if most - board[slowest].backwards <= delta or slow_s is None:
        return None
    ends_s = {
        one: (len(left[one]) + 1) * mine_s
        for one in stage
        if (mine_s := each_s[one]) is not None and mine_s * FASTER < slow_s
    }
    if not ends_s:
        return None
    fastest = min(ends_s, key=lambda one: (ends_s[one], one))
    if ends_s[fastest] >= len(left[slowest]) * slow_s:
        return None
    makespan = step_time(lambda one, kind: _seconds(board, one, kind))
    now_s = makespan(program)
    for micro_batch in left[slowest][: -TRIES - 1 : -1]:
        move = Move(micro_batch=micro_batch, source=slowest, target=fastest)
        found = amended(program, plan, move, begun, makespan, below=now_s * (1 - GAIN))
        if found is not None:
            saves_s = now_s - makespan(found.program)
            return Decision(move=move, amended=found, saves_s=saves_s)
    return None


def _seconds(board: Board, one: Instance, kind: Kind) -> float:
    progress = board.get(one)
    return (progress.each_s(kind) if progress else None) or 0.0
