"""One step as a Gantt chart: as it was measured, else as its plan says it should go."""

from __future__ import annotations

import math

from resihp_ext.detector.timed import RankStep
from resihp_ext.plan.action import COMPUTE, Kind
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.plan import Plan
from resihp_ext.plan.schedule import default_duration, one_forward_one_backward
from resihp_ext.report.page import figure
from resihp_ext.report.run import Run
from resihp_ext.report.strips import Row, Slice, gantt
from resihp_ext.telemetry.trace import timed_steps
from resihp_ext.whatif.layout import ranges

COLOURS = {
    Kind.FORWARD: "var(--c0)",
    Kind.BACKWARD: "var(--c1)",
    Kind.WEIGHT: "var(--c2)",
    Kind.SYNC: "var(--c3)",
    Kind.STEP: "var(--c4)",
}
MOST_ROWS = 32


def pipeline(run: Run) -> str:
    """The HTML: the last measured step, or the last plan; nothing without either."""
    steps = list(timed_steps(run.events))
    if steps:
        last = max(one.step for one in steps)
        return _measured([one for one in steps if one.step == last])
    if not run.plans:
        return ""
    return expected(run.plans[max(run.plans)])


def expected(plan: Plan) -> str:
    """A step of a plan by its own order of work, in units of a layer's forward."""
    price = default_duration(plan, False)
    line = dry_run(
        one_forward_one_backward(plan),
        lambda one, action: price(one, action.kind) if action.kind in COMPUTE else 0.0,
    )
    rows: dict[str, list[Slice]] = {}
    for span in line.spans:
        if span.action.kind in COMPUTE:
            ranks = ranges(plan.stage(span.cell.instance).ranks)
            name = f"{span.cell.instance}: ranks {ranks}"
            rows.setdefault(name, []).append(
                Slice(
                    begin=span.start,
                    end=span.end,
                    colour=COLOURS[span.action.kind],
                    words=str(span.action),
                )
            )
    drawn = [Row(label=name, slices=slices) for name, slices in sorted(rows.items())]
    return figure(
        gantt("One step", "layers, by TP degree and speed", drawn[:MOST_ROWS]),
        "One step of the last plan as its program says: forward blue, backward orange. Not "
        "measured (run the job with --resilience-timings-steps for that); messages take no time."
        + _rest(len(drawn)),
    )


def _measured(steps: list[RankStep]) -> str:
    zero_s = min(one.begun_s for one in steps)
    rows = []
    for one in sorted(steps, key=lambda step: step.rank):
        shift = one.begun_s - zero_s
        slices = [
            Slice(
                begin=shift + action.start_s,
                end=shift + action.end_s,
                colour=COLOURS[Kind(action.kind)],
                words=f"{action.kind}{action.micro_batch}: {action.own_s:.4f} s own work, "
                f"{action.wait_s:.4f} s waited",
            )
            for action in one.actions
            if Kind(action.kind) in COLOURS and math.isfinite(action.own_s)
        ]
        rows.append(Row(label=f"rank {one.rank}", slices=slices))
    return figure(
        gantt("One step", "seconds", rows[:MOST_ROWS]),
        f"Step {steps[0].step}, measured: forward blue, backward orange, reduction purple, "
        "optimizer yellow; clocks are those of the ranks' hosts." + _rest(len(rows)),
    )


def _rest(rows: int) -> str:
    return f" The first {MOST_ROWS} of {rows} rows." if rows > MOST_ROWS else ""
