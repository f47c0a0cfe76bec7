"""Plays a step in which work moves: what migration gains when instances are as slow as they are.

The same decisions as in a job, on the clock of the dry run. An amended list begins with what has
been begun, so the dry run of the last program is what has happened.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from resihp_ext.plan.action import COMPUTE, SENDS, Kind
from resihp_ext.plan.amend import Move
from resihp_ext.plan.dry_run import Cost, Span, Timeline, dry_run
from resihp_ext.plan.plan import Instance, Plan
from resihp_ext.plan.program import Program
from resihp_ext.scheduler.migration import Progress, decide


@dataclass(frozen=True, kw_only=True)
class Migrated:
    """How a step went."""

    plan: Plan
    program: Program
    """As it was executed in the end."""
    makespan_s: float
    moves: tuple[Move, ...]


def play_migrating(
    program: Program, plan: Plan, cost: Cost, delta: int, *, latency_s: float = 0.0
) -> Migrated:
    """Plays a step; progress is looked at whenever a backward ends.

    Args:
        program: Of a training step.
        cost: What actions really take.
        delta: See :func:`~resihp_ext.scheduler.migration.decide`; 0: nothing moves.
        latency_s: Until all who are concerned have heard of a move, and the next one is looked for.
    """
    moves: list[Move] = []
    line = dry_run(program, cost)
    now_s = 0.0
    while delta:
        following = [s.end for s in line.spans if s.action.kind is Kind.BACKWARD and s.end > now_s]
        if not following:
            break
        now_s = min(following)
        board = board_at(program, line, now_s, latency_s)
        found = decide(program, plan, board, delta)
        if found is not None:
            program, plan = found.amended.program, found.amended.plan
            moves.append(found.move)
            line = dry_run(program, cost)
            now_s += latency_s
    return Migrated(plan=plan, program=program, makespan_s=line.makespan, moves=tuple(moves))


def board_at(
    program: Program, line: Timeline, now_s: float, latency_s: float = 0.0
) -> dict[Instance, Progress]:
    """What is known at a time, with what will have begun a little later."""
    spans: dict[Instance, list[Span]] = {host: [] for host in program.instances}
    for span in line.spans:
        spans[span.cell.instance].append(span)
    return {host: _progress(mine, now_s, latency_s) for host, mine in spans.items()}


def _progress(spans: list[Span], now_s: float, latency_s: float) -> Progress:
    # A receive is begun when its rank is free for it, which may be long before the message comes.
    free_s, begins_s = 0.0, []
    for span in spans:
        begins_s.append(free_s)
        if span.action.kind not in SENDS:
            free_s = span.end
    done = [s for s in spans if s.action.kind in COMPUTE and s.end <= now_s]
    took = {
        kind: [s.end - s.start for s in done if s.action.kind is kind]
        for kind in (Kind.FORWARD, Kind.BACKWARD)
    }
    return Progress(
        begun=bisect_right(begins_s, now_s + latency_s),
        forwards=len(took[Kind.FORWARD]),
        backwards=len(took[Kind.BACKWARD]),
        forward_s=sum(took[Kind.FORWARD]),
        backward_s=sum(took[Kind.BACKWARD]),
    )
