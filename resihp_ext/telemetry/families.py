"""Facts of a node and of a job as Prometheus metrics.

Pure. Names follow Prometheus' conventions: base units, ``_total`` for counters. Labels are ranks,
connected nodes, and names out of fixed lists, so there are never more series than the job has
places. A figure that is not known (yet) is left out. Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from resihp_ext.control.job_state import Phase
from resihp_ext.control.losses import LOST_KINDS
from resihp_ext.control.node import NodeFacts
from resihp_ext.control.slots import State
from resihp_ext.control.tally import BOUNDS_S

SUSPECTS = ("device", "host", "link")


def node_families(facts: NodeFacts, node: str) -> Iterator[Metric]:
    """Of one agent and its workers."""
    own = {"node": node}
    yield _gauge(
        "resihp_node_step", "The furthest that a worker of the node has come.", own, facts.step
    )
    yield _gauge(
        "resihp_node_workers", "Workers of the node that are connected.", own, facts.workers
    )
    yield _gauge(
        "resihp_node_stuck_seconds",
        "How long all workers of the node have waited and none has moved, if longer than usual.",
        own,
        facts.stuck_s,
    )
    if facts.unanswered_s is not None:
        yield _gauge(
            "resihp_node_unanswered_seconds",
            "Since the last heartbeat of the node that the coordinator has answered.",
            own,
            facts.unanswered_s,
        )
    yield _counter(
        "resihp_node_killed", "Workers that the node was to end.", {(): facts.killed}, own
    )
    yield _counter(
        "resihp_node_dropped_messages",
        "Bad messages to the node's agent, by kind.",
        {(kind,): count for kind, count in facts.dropped.items()},
        own,
        "kind",
    )


def job_families(status: Mapping[str, Any]) -> Iterator[Metric]:
    """Of the job as a whole.

    Args:
        status: As the coordinator tells it, see ``CoordinatorServer.status``.
    """
    yield from _progress(status)
    yield from _places(status)
    yield from _troubles(status)


def _progress(status: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("resihp_step", "The furthest that a rank has come, from 1.", {}, status["step"])
    if status["step_s"] is not None:
        yield _gauge(
            "resihp_step_seconds",
            "What a step takes: mean of the last 15, with recoveries that came between them.",
            {},
            status["step_s"],
        )
    yield _gauge("resihp_epoch", "Groups of members so far, from 0.", {}, status["epoch"])
    if status["plan"] is not None:
        yield _gauge("resihp_plan_version", "Version of the plan.", {}, status["plan"])
    yield _gauges(
        "resihp_phase",
        "1 for what the job as a whole is doing.",
        {phase.value: float(phase.value == status["phase"]) for phase in Phase},
        "phase",
    )


def _places(status: Mapping[str, Any]) -> Iterator[Metric]:
    nodes = status["nodes"].values()
    states = Counter(slot["state"] for node in nodes for slot in node["ranks"].values())
    yield _gauges(
        "resihp_ranks",
        "Ranks by state.",
        {state.value: states[state.value] for state in State},
        "state",
    )
    yield _gauge("resihp_standby_ranks", "Members without a stage.", {}, len(status["standby"]))
    yield _gauge("resihp_nodes", "Nodes that are connected.", {}, _count(nodes, "alive"))
    yield _gauge("resihp_drained_nodes", "Nodes that are drained.", {}, _count(nodes, "drained"))
    yield _gauge(
        "resihp_quarantined_nodes",
        "Nodes that get no new processes because too many have died there.",
        {},
        _count(nodes, "quarantined"),
    )
    yield _gauges(
        "resihp_device_speed",
        "Throughput of a member's device: 1 healthy, 0.5 twice as slow.",
        status["speeds"],
        "rank",
    )
    yield _gauges(
        "resihp_heartbeat_age_seconds",
        "Since a node was last heard of.",
        status["heard_ago_s"],
        "node",
    )


def _troubles(status: Mapping[str, Any]) -> Iterator[Metric]:
    yield _by_kind("resihp_lost", "Processes that were lost.", status["lost"], known=LOST_KINDS)
    yield _counter(
        "resihp_recoveries",
        "Recoveries for which members were told a plan.",
        {(): status["recoveries"]},
    )
    times = status["recovery_times"]
    bounds = [*map(str, BOUNDS_S), "+Inf"]
    yield HistogramMetricFamily(
        "resihp_recovery_seconds",
        "From a loss until all members ran a plan again.",
        buckets=list(zip(bounds, accumulate(times["counts"]), strict=True)),
        sum_value=times["sum_s"],
    )
    yield _counter(
        "resihp_restarts",
        "Restarts of all workers before the first step.",
        {(): status["restarts"]},
    )
    yield _by_kind("resihp_suspects", "Reports of slowness.", status["suspected"], known=SUSPECTS)
    yield _by_kind("resihp_dropped_messages", "Bad messages to the coordinator.", status["dropped"])


# Families


def _gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _gauges(name: str, text: str, values: Mapping[str, float], label: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _by_kind(name: str, text: str, counts: Mapping[str, int], known: Iterable[str] = ()) -> Metric:
    """A counter that shows 0 for what is known and has not happened: rates need a beginning."""
    whole = dict.fromkeys(known, 0) | dict(counts)
    return _counter(name, text, {(kind,): count for kind, count in whole.items()}, {}, "kind")


def _counter(
    name: str,
    text: str,
    counts: Mapping[tuple[str, ...], float],
    fixed: Mapping[str, str] | None = None,
    *labels: str,
) -> Metric:
    own = fixed or {}
    family = CounterMetricFamily(name, text, labels=[*own, *labels])
    for key, count in counts.items():
        family.add_metric([*own.values(), *key], count)
    return family


def _count(nodes: Iterable[Mapping[str, Any]], fact: str) -> int:
    return sum(bool(node[fact]) for node in nodes)
