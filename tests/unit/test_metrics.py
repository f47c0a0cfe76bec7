"""What Prometheus is told: names, labels and figures, and the endpoint that tells it."""

from __future__ import annotations

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from coordinated import Driver, running
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector, CollectorRegistry

from resihp_ext.control.node import NodeFacts
from resihp_ext.control.tally import BOUNDS_S, STEPS_KEPT, Pace, Tally
from resihp_ext.errors import ResiHPError, UserError
from resihp_ext.launcher import run
from resihp_ext.telemetry import endpoint as serving
from resihp_ext.telemetry.endpoint import Endpoint
from resihp_ext.telemetry.families import job_families, node_families

pytestmark = pytest.mark.unit

Figures = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def status_of(job: Driver, **more: Any) -> dict[str, Any]:
    """As the coordinator's server completes it."""
    status = {"step": 7, "step_s": 0.5, "heard_ago_s": {"n0": 0.2}, "dropped": {"handshake": 3}}
    return job.rules.status() | status | more


def read(families: Iterable[Metric]) -> Figures:
    """Written as Prometheus gets it, and read by the library's own parser."""

    class Given(Collector):
        def collect(self) -> Iterator[Metric]:
            return iter(list(families))

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Given())
    return parsed(generate_latest(registry).decode())


def parsed(text: str) -> Figures:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_job_in_peace() -> None:
    found = read(job_families(status_of(running(2, 2))))
    assert found["resihp_step", ()] == 7
    assert found["resihp_step_seconds", ()] == 0.5
    assert found["resihp_phase", (("phase", "running"),)] == 1
    assert sum(v for (name, _), v in found.items() if name == "resihp_phase") == 1
    assert found["resihp_ranks", (("state", "member"),)] == 4
    assert sum(v for (name, _), v in found.items() if name == "resihp_ranks") == 4
    assert found["resihp_nodes", ()] == 2
    assert [found["resihp_device_speed", (("rank", str(k)),)] for k in range(4)] == [1.0] * 4
    assert found["resihp_heartbeat_age_seconds", (("node", "n0"),)] == 0.2
    assert found["resihp_dropped_messages_total", (("kind", "handshake"),)] == 3
    kinds = {labels[0][1] for name, labels in found if name == "resihp_lost_total"}
    assert kinds == {"signal", "exit", "hang", "node"}, "zeros are there before anything happens"
    assert found["resihp_recovery_seconds_count", ()] == 0


def test_a_job_that_has_recovered() -> None:
    job = running(2, 2)
    job.die(3, "was killed by signal 9 (SIGKILL)")
    assert read(job_families(status_of(job)))["resihp_phase", (("phase", "recovering"),)] == 1
    job.now_s += 1.5
    job.recover()
    found = read(job_families(status_of(job)))
    assert found["resihp_lost_total", (("kind", "signal"),)] == 1
    assert found["resihp_recoveries_total", ()] == 1
    assert found["resihp_recovery_seconds_sum", ()] == pytest.approx(1.5)
    buckets = {
        float(labels[0][1]): value
        for (name, labels), value in found.items()
        if name == "resihp_recovery_seconds_bucket"
    }
    assert (buckets[1.0], buckets[2.0], buckets[float("inf")]) == (0, 1, 1)
    assert found["resihp_ranks", (("state", "preparing"),)] == 1, "its replacement"
    assert ("resihp_device_speed", (("rank", "3"),)) not in found, "it has no device any more"


def test_the_lower_of_planned_and_measured_speed_is_told() -> None:
    job = running(2, 2)
    job.rules.job.slowness.confirmed({1: 0.5, 9: 0.2})
    job.rules.job.slowness.suspected["device"] = 2
    found = read(job_families(status_of(job)))
    assert [found["resihp_device_speed", (("rank", str(k)),)] for k in (0, 1)] == [1.0, 0.5]
    assert ("resihp_device_speed", (("rank", "9"),)) not in found
    assert found["resihp_suspects_total", (("kind", "device"),)] == 2
    assert found["resihp_suspects_total", (("kind", "link"),)] == 0


def test_before_the_job_runs_unknown_figures_are_left_out() -> None:
    found = read(job_families(status_of(Driver(), step_s=None)))
    names = {name for name, _ in found}
    assert "resihp_phase" in names
    assert not {"resihp_step_seconds", "resihp_plan_version", "resihp_device_speed"} & names


def test_a_node_tells_its_own() -> None:
    facts = NodeFacts(
        step=4, workers=2, stuck_s=0.0, unanswered_s=None, killed=1, dropped={"wrong rank": 1}
    )
    found = read(node_families(facts, "gpu1"))
    own = ("node", "gpu1")
    assert found["resihp_node_step", (own,)] == 4
    assert found["resihp_node_killed_total", (own,)] == 1
    assert found["resihp_node_dropped_messages_total", (("kind", "wrong rank"), own)] == 1
    assert ("resihp_node_unanswered_seconds", (own,)) not in found


def test_the_pace_is_the_mean_of_the_last_steps() -> None:
    pace = Pace()
    assert pace.step_s is None
    pace.seen(1, 10.0)
    assert pace.step_s is None
    pace.seen(1, 10.5)
    pace.seen(3, 14.0)
    pace.seen(2, 15.0)
    assert pace.step_s == 2.0
    for k in range(STEPS_KEPT):
        pace.seen(4 + k, 20.0 + k)
    assert pace.step_s == 1.0, "earlier ones are forgotten"


def test_a_tally_counts_by_the_first_bound_that_holds() -> None:
    tally = Tally()
    for seconds in (0.1, BOUNDS_S[0], BOUNDS_S[-1] + 1):
        tally.add(seconds)
    assert (tally.counts[0], tally.counts[-1], sum(tally.counts)) == (2, 1, 3)


# The endpoint


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    made = Endpoint("127.0.0.1", free_port())
    yield made
    made.close()


def fetch(endpoint: Endpoint) -> str:
    host, port = endpoint.address
    with urllib.request.urlopen(f"http://{host}:{port}/metrics", timeout=20) as answer:
        return str(answer.read().decode())


def one_gauge(value: float) -> Metric:
    family = GaugeMetricFamily("resihp_x", "Something.")
    family.add_metric([], value)
    return family


def test_it_serves_what_is_there_when_it_is_asked(endpoint: Endpoint) -> None:
    assert "resihp_x" not in fetch(endpoint)
    endpoint.show(lambda _wait_s: [one_gauge(1)])
    assert parsed(fetch(endpoint))["resihp_x", ()] == 1
    endpoint.show(lambda _wait_s: [one_gauge(2)])
    found = parsed(fetch(endpoint))
    assert found["resihp_x", ()] == 2
    assert found["process_open_fds", ()] > 3


def test_only_the_chosen_interface_answers(endpoint: Endpoint) -> None:
    with socket.socket() as other, pytest.raises(ConnectionRefusedError):
        other.connect(("127.0.0.2", endpoint.address[1]))


def test_a_thread_that_does_not_answer_costs_its_part_alone(endpoint: Endpoint) -> None:
    def source(_wait_s: float) -> Iterator[Metric]:
        yield one_gauge(1)
        raise ResiHPError("coordinator has ended")

    endpoint.show(source)
    assert parsed(fetch(endpoint))["resihp_x", ()] == 1


def test_a_defect_is_an_error_500_and_is_said_once(
    endpoint: Endpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    def source(_wait_s: float) -> Iterator[Metric]:
        raise KeyError("step")
        yield

    endpoint.show(source)
    for _ in range(2):
        with pytest.raises(urllib.error.HTTPError, match="500"):
            fetch(endpoint)
    assert capfd.readouterr().err == "resihp-run: no metrics: KeyError('step')\n"


def test_silent_clients_block_nobody_for_long(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving._Handler, "timeout", 0.5)
    before = threading.active_count()
    silent = [socket.create_connection(endpoint.address) for _ in range(3 * serving.REQUESTS)]
    time.sleep(0.2)
    assert threading.active_count() - before <= serving.REQUESTS
    time.sleep(0.8)
    assert "process_open_fds" in fetch(endpoint)
    for one in silent:
        one.close()


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--metrics-port", "{busy}"], "metrics at 127.0.0.1 port {busy}: Address already in use"),
        (["--metrics-port", "9", "--metrics-host", ""], "needs the name or address"),
        (["--metrics-port", "70000"], "--metrics-port 70000: give a port from 1 to 65535"),
        (["--metrics-port", "x"], "invalid int value: 'x'"),
        (["--metrics-port", "9999", "--metrics-host", "203.0.113.5"], "Cannot assign requested"),
    ],
)
def test_a_place_that_cannot_be_had_is_one_line(
    flags: list[str],
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOGLEVEL", "WARNING")  # else all of this process's log is silenced
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        words = [word.format(busy=port) for word in flags]
        assert run.main([*words, "--nproc-per-node", "1", __file__]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert line.format(busy=port) in said


def test_a_name_that_nobody_has_is_one_line() -> None:
    with pytest.raises(UserError, match=r"metrics at no such host\.invalid port 9"):
        Endpoint("no such host.invalid", 9)
