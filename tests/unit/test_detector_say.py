"""Lines of the detector for people."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest

from resihp_ext.detector.say import (
    MOST_CHARACTERS,
    plan_line,
    recovered_line,
    report_lines,
    suspect_line,
    unexplained_line,
    verdict_line,
)
from resihp_ext.detector.suspect import Report, Suspect, SuspectKind, Verdict
from resihp_ext.plan.plan import Device, Instance, Plan, Replica, Stage, uniform_plan

pytestmark = pytest.mark.unit

NODES = {rank: f"n{rank // 4}" for rank in range(8)}


def suspect(kind: SuspectKind = "device", *ranks: int, p: float = 0.521) -> Suspect:
    return Suspect(kind=kind, ranks=ranks or (5,), p=p, since_step=40, evidence="")


def plan(tp: int = 2, dp: int = 2) -> Plan:
    """Eight ranks on two nodes."""
    pp = 8 // tp // dp
    return uniform_plan(
        num_layers=8, tp=tp, pp=pp, dp=dp, micro_batches=8, virtual=1, devices_per_node=4
    )


def test_a_slow_device() -> None:
    said = "resihp: rank 5 (node n1) works at 0.52 of its speed since step 40"
    assert suspect_line(suspect(), NODES, plan=plan()) == (
        f"{said} and keeps its stage waiting; measuring it"
    )
    assert suspect_line(suspect(), NODES) == f"{said}; measuring it"
    assert suspect_line(suspect(), NODES, then="") == said
    assert suspect_line(suspect(), {}, then="").startswith("resihp: rank 5 works at 0.52 of")


def test_who_waits_depends_on_the_plan() -> None:
    assert suspect_line(suspect(), {}, plan=plan(tp=1), then="").endswith(
        "and keeps its pipeline waiting"
    )
    idle = Device(rank=8, node=2, p=1.0)
    known = plan()
    with_idle = replace(known, devices=(*known.devices, idle))
    assert suspect_line(suspect("device", 8), {}, plan=with_idle, then="").endswith(
        "and holds no stage: nobody waits for it"
    )


@pytest.mark.parametrize(
    ("one", "dp", "line"),
    [
        (
            suspect("link", 3, 4, p=0.25),
            1,
            "the link between ranks 3 (node n0) and 4 (node n1) works at 0.25 of its speed since "
            "step 40 and keeps its pipeline waiting",
        ),
        (
            suspect("link", 0, 4, p=0.25),
            2,
            "the link between ranks 0 (node n0) and 4 (node n1) works at 0.25 of its speed since "
            "step 40 and keeps replica 0 waiting",
        ),
        (
            suspect("host", 4, 5, 6, 7, p=0.8),
            2,
            "all 4 ranks of node n1 (4-7) work at 0.80 of their speed since step 40 and keep "
            "replicas 0-1 waiting",
        ),
        (
            suspect("host", 4, 5, p=0.8),
            1,
            "both ranks of node n1 (4-5) work at 0.80 of their speed since step 40 and keep their "
            "pipeline waiting",
        ),
    ],
)
def test_slow_links_and_hosts(one: Suspect, dp: int, line: str) -> None:
    assert suspect_line(one, NODES, plan=plan(dp=dp), then="") == f"resihp: {line}"


@pytest.mark.parametrize(
    ("verdict", "p", "end"),
    [
        (Verdict.SLOW, 0.5, "measured at 0.50 of full speed, slow indeed"),
        (
            Verdict.HEALTHY,
            0.99,
            "measured at 0.99 of full speed, healthy after all; nothing changes",
        ),
        (Verdict.UNKNOWN, None, "could not be measured; taken for slow, as its times say"),
    ],
)
def test_verdicts(verdict: Verdict, p: float | None, end: str) -> None:
    line = verdict_line(suspect(), NODES, verdict, p)
    assert line == f"resihp: rank 5 (node n1): {end}"


def test_recovery() -> None:
    assert recovered_line((5,), NODES, 90) == (
        "resihp: rank 5 (node n1) works at full speed again since step 90"
    )
    assert recovered_line((4, 3), NODES, 90) == (
        "resihp: ranks 3-4 (nodes n0, n1) work at full speed again since step 90"
    )


def test_all_news_of_a_step() -> None:
    quiet = Report(step=41, observed_s=nan, predicted_s=nan, ratio=nan)
    assert report_lines(quiet, NODES) == []
    slow = Report(step=41, observed_s=0.4567, predicted_s=0.3, ratio=1.522, unexplained=True)
    assert unexplained_line(slow) == (
        "resihp: step 41 took 0.457 s, 1.52 times the 0.3 s predicted, and no device or link "
        "explains it"
    )
    all_news = replace(slow, suspects=(suspect(), suspect("link", 3, 4)), recovered=(1,))
    assert report_lines(all_news, NODES, plan=plan()) == [
        suspect_line(suspect(), NODES, plan=plan()),
        suspect_line(suspect("link", 3, 4), NODES, plan=plan()),
        recovered_line((1,), NODES, 41),
        unexplained_line(slow),
    ]


def test_a_change_for_a_slow_device() -> None:
    before = plan(tp=1)
    first, second = before.replicas
    stages = tuple(
        Stage(ranks=stage.ranks, layers=layers)
        for stage, layers in zip(second.stages, [(0, 3), (3, 5), (5, 6), (6, 8)], strict=True)
    )
    routes = list(before.routes)
    moved = next(place for place, route in enumerate(routes) if route[0].replica == 1)
    routes[moved] = next(route for route in routes if route[0].replica == 0)
    after = before.next_version(
        replicas=(first, Replica(stages=stages)),
        devices=tuple(replace(one, p=0.5 if one.rank == 5 else one.p) for one in before.devices),
        routes=tuple(routes),
    ).validated()
    assert plan_line(41, before, after, "rank 5 is slow") == (
        "resihp: from step 41 plan 1 instead of 0 (rank 5 is slow); rank 5 at 0.50 of full speed; "
        "3 of 8 stages hold other layers or have other ranks, micro-batches by first stage 5/3"
    )
    back = plan_line(90, after, replace(before, version=2))
    assert "plan 2 instead of 1; rank 5 at 1.00 of full speed; 3 of 8 stages" in back


def test_a_change_for_dead_devices() -> None:
    before = plan(tp=1)
    dead = (3, 7)
    after = before.next_version(
        replicas=before.replicas[:1],
        devices=tuple(replace(one, p=0.0 if one.rank in dead else 1.0) for one in before.devices),
        routes=(tuple(Instance(replica=0, stage=k) for k in range(4)),) * 8,
    )
    ranks = {rank for stage in after.replicas[0].stages for rank in stage.ranks}
    assert len(ranks) == 4
    line = plan_line(7, before, after)
    assert line == (
        "resihp: from step 7 plan 1 instead of 0; ranks 3, 7 dead; 1 replica instead of 2, "
        f"micro-batches by first stage 8; 4 ranks of 8 work, {len(after.standby)} stand by"
    )


def test_nothing_has_changed() -> None:
    after = plan().next_version()
    assert plan_line(3, plan(), after).endswith("; the same work on the same ranks")


def test_a_line_stays_one_line() -> None:
    line = plan_line(3, plan(), plan().next_version(), "forged\nresihp: \x1b[2J" + "x" * 999)
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.endswith("xxx...); the same work on the same ranks")
    assert len(suspect_line(suspect(), NODES, then="x" * 999)) == MOST_CHARACTERS
