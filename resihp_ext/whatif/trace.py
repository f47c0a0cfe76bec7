"""A step of the chosen plan as a Chrome trace, for Perfetto or chrome://tracing.

A process is a replica, a thread one of its rank groups, named by its stage. What keeps a group busy
is a complete event ("X"). A send runs beside its group's next work, and such events of one thread
must not overlap: it is an asynchronous pair ("b", "e"). Times are predicted, in microseconds. The
format: "Trace Event Format" (Google, 2016).

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from resihp_ext.plan.action import COMPUTE, RECEIVES, SENDS, Kind
from resihp_ext.plan.dry_run import Span, Timeline, dry_run
from resihp_ext.plan.plan import Plan, Stage
from resihp_ext.plan.program import Program
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.scheduler.problem import Problem
from resihp_ext.whatif.layout import ranges

Event = dict[str, Any]

CATEGORIES = {
    **dict.fromkeys(COMPUTE, "compute"),
    **dict.fromkeys([*SENDS, *RECEIVES], "transfer"),
    Kind.SYNC: "sync",
    Kind.STEP: "step",
}


def trace_json(problem: Problem, plan: Plan) -> str:
    """The trace of one step of a plan, on the problem's devices as they are."""
    # A plan that is kept keeps its program, which was made for the devices as they were.
    duration = problem.cost.duration(plan, problem.shape, policy=problem.policy)
    program = one_forward_one_backward(plan, duration=duration)
    now = replace(plan, devices=problem.cluster.devices)
    timeline = dry_run(program, problem.cost.cost(now, problem.shape, policy=problem.policy))
    return json.dumps(
        {
            "traceEvents": [*_names(now, program), *_spans(now, program, timeline)],
            "displayTimeUnit": "ms",
            "otherData": {"plan": plan.digest, "iteration_s": timeline.makespan},
        },
        separators=(",", ":"),
    )


def _names(plan: Plan, program: Program) -> Iterator[Event]:
    """What processes and threads are called, and their order."""
    for number in range(len(plan.replicas)):
        yield _about("process_name", number, 0, name=f"replica {number}")
        yield _about("process_sort_index", number, 0, sort_index=number)
    for host in program.instances:
        stage = plan.stage(host)
        name = f"stage {host.stage}: ranks {ranges(stage.ranks)}"
        yield _about("thread_name", host.replica, host.stage, name=name)
        yield _about("thread_sort_index", host.replica, host.stage, sort_index=host.stage)


def _about(what: str, process: int, thread: int, **args: object) -> Event:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": args}


def _spans(plan: Plan, program: Program, timeline: Timeline) -> Iterator[Event]:
    p_of = {device.rank: device.p for device in plan.devices}
    places = {one: _place(plan.stage(one), p_of) for one in plan.instances}
    for number, span in enumerate(timeline.spans):
        host, action = span.cell.instance, span.action
        event: Event = {
            "name": str(action),
            "cat": CATEGORIES[action.kind],
            "pid": host.replica,
            "tid": host.stage,
        }
        # Whole nanoseconds: spans that touch do so in the file, too.
        begin_us, end_us = round(span.start * 1e6, 3), round(span.end * 1e6, 3)
        args = {**_args(span), **places[program.target(host, action)]}
        if action.kind in SENDS:
            yield {**event, "ph": "b", "id": number, "ts": begin_us, "args": args}
            yield {**event, "ph": "e", "id": number, "ts": end_us, "args": {}}
        else:
            duration_us = round(end_us - begin_us, 3)
            yield {**event, "ph": "X", "ts": begin_us, "dur": duration_us, "args": args}


def _args(span: Span) -> dict[str, Any]:
    action = span.action
    found: dict[str, Any] = {"kind": action.kind.value}
    if action.micro_batch >= 0:
        found["micro_batch"] = action.micro_batch
    if action.peer is not None:
        found["peer"] = f"replica {action.peer.replica}, stage {action.peer.stage}"
    return found


def _place(stage: Stage, p_of: Mapping[int, float]) -> dict[str, Any]:
    return {
        "ranks": ranges(stage.ranks),
        "tp": stage.tp,
        "layers": f"{stage.layers[0]}-{stage.layers[1] - 1}",
        "p": min(p_of[rank] for rank in stage.ranks),
    }
