"""The run as a whole: in two sentences, in figures, and over time.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import math
from statistics import median

from resihp_ext.events import Event
from resihp_ext.report.chart import Mark, Series, lines
from resihp_ext.report.page import Cell, figure, table
from resihp_ext.report.run import Entry, Iteration, Run

MOST_POINTS = 1500
"""Of a line; of more, medians of equally many are drawn."""


def sentences(run: Run) -> list[str]:
    """What happened, for who reads nothing else."""
    done = run.iterations
    lost = [one for one in run.receipts if one.get("losses")]
    others = len(run.receipts) - len(lost)
    ranks = sorted({int(x["rank"]) for one in lost for x in one["losses"] if "rank" in x})
    first = (
        f"{len(done)} steps in {_span(run.end_s)}, up to step {done[-1].step}."
        if done
        else f"No step has ended in {_span(run.end_s)}."
    )
    if not run.receipts:
        return [f"{first} The layout never changed."]
    parts = []
    if lost:
        who = ", ".join(map(str, ranks[:12])) + (", ..." if len(ranks) > 12 else "")
        parts.append(f"{_times(len(lost))} ranks were lost ({who}) and the others went on")
    if others:
        parts.append(f"{_times(others)} the layout changed for another reason")
    return [f"{first} {'; '.join(parts).capitalize()}.", *run.notes]


def figures(run: Run) -> str:
    """A table of figures."""
    done = run.iterations
    known = [one.seconds for one in done if math.isfinite(one.seconds)]
    tokens = sum(one.tokens for one in done)
    totals = [float(one["total_s"]) for one in run.receipts if "total_s" in one]
    rows: list[list[Cell]] = [
        ["steps that count", len(done)],
        ["tokens trained on", tokens or None],
        ["tokens a second, over all", tokens / run.end_s if tokens and run.end_s else None],
        ["median of a step, s", median(known) if known else None],
        ["changes of the layout", len(run.receipts)],
        ["median of a change, s", median(totals) if totals else None],
        ["all changes, s", math.fsum(totals) if totals else 0.0],
        ["steps done again", sum(int(one.get("redone_steps") or 0) for one in run.receipts)],
        ["bytes moved", sum(int(one.get("moved_bytes") or 0) for one in run.receipts)],
    ]
    return table(["", "figure"], rows)


def over_time(run: Run) -> str:
    """Throughput and loss, with what happened in between."""
    done, marks = run.iterations, list(_marks(run))
    parts = []
    unit = "tokens a second" if any(one.tokens for one in done) else "steps a second"
    pace = _thin([(one.end_s, _pace(one)) for one in done if math.isfinite(one.seconds)])
    if pace:
        drawn = lines(
            "Throughput",
            "seconds since the run began",
            unit,
            [Series(name="throughput", points=pace)],
            marks=marks,
            from_zero=True,
        )
        parts.append(figure(drawn, f"Throughput, {unit}. {LEGEND}"))
    loss = _thin([(one.end_s, one.loss) for one in done if math.isfinite(one.loss)])
    if loss:
        drawn = lines(
            "Loss",
            "seconds since the run began",
            "loss",
            [Series(name="loss", points=loss)],
            marks=marks,
        )
        parts.append(figure(drawn, f"Loss of the steps that count. {LEGEND}"))
    return "".join(parts)


LEGEND = (
    "Red: devices were lost. Grey: the layout changed, or a device was found slow. Point at one."
)


def _marks(run: Run) -> list[Mark]:
    found = []
    for one in run.receipts:
        at_s = one.get("resumed_s")
        if not isinstance(at_s, int | float):
            event = next(
                (e for e in run.named(Event.TRANSITION) if e["to_version"] == one["to_version"]),
                None,
            )
            at_s = None if event is None else event["time_s"]
        if at_s is not None:
            words = f"step {one['step']}: {one.get('reason', '')}"
            kind = "bad" if one.get("losses") else "mark"
            found.append(Mark(x=float(at_s) - run.begin_s, words=words, kind=kind))
    for event in run.named(Event.VALIDATION):
        words = _measured(event)
        found.append(Mark(x=run.at_s(event), words=words))
    return sorted(found, key=lambda mark: mark.x)


def _measured(event: Entry) -> str:
    who = f"{event.get('kind')} {event.get('ranks')}"
    return f"step {event['step']}: {who} measured: {event.get('verdict')}"


def decisions(run: Run) -> str:
    """Every decision about another plan, with its reason; nothing where there was none."""
    entries: list[tuple[float, list[Cell]]] = []
    for event in run.named(Event.WEIGHED):
        gain = event.get("gain")
        entries.append(
            (
                run.at_s(event),
                [
                    int(event["step"]),
                    str(event.get("verdict")),
                    str(event.get("why")),
                    f"{100 * gain:.1f} %" if isinstance(gain, int | float) else None,
                    _number(event, "lost_s"),
                    _number(event, "cost_s"),
                ],
            )
        )
    for event in run.named(Event.VALIDATION):
        words = f"{event.get('kind')} {event.get('ranks')}: {event.get('evidence')}"
        entries.append(
            (
                run.at_s(event),
                [int(event["step"]), f"measured: {event.get('verdict')}", words, None, None, None],
            )
        )
    if not entries:
        return ""
    head = ["step", "decision", "why", "saves of a step", "lost so far, s", "change costs, s"]
    return table(head, [row for _, row in sorted(entries, key=lambda one: one[0])])


def _number(event: Entry, key: str) -> float | None:
    value = event.get(key)
    return float(value) if isinstance(value, int | float) else None


def _pace(one: Iteration) -> float:
    return (one.tokens or 1) / one.seconds


def _thin(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    each = -(-len(points) // MOST_POINTS)
    if each <= 1:
        return points
    parts = [points[at : at + each] for at in range(0, len(points), each)]
    return [(part[-1][0], median(y for _, y in part)) for part in parts]


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest / 60:.1f} min"
