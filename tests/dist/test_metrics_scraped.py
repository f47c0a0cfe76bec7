"""The metrics of a real job of two nodes whose worker dies, read as Prometheus reads them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
import test_resilient_launcher as launching
from prometheus_client.parser import text_string_to_metric_families
from test_resilient_launcher import LIMIT_S, Job, free_port, kill, nodes

pytestmark = pytest.mark.dist

job = launching.job

Figures = dict[tuple[str, frozenset[str]], float]
"""By name and values of labels."""


def scrape(port: int) -> Figures:
    """Nothing where nobody answers (yet)."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    except (urllib.error.URLError, ConnectionError):
        return {}
    return {
        (sample.name, frozenset(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(found: Figures, name: str, *labels: str) -> float | None:
    return found.get((name, frozenset(labels)))


def start(job: Job) -> list[int]:
    """Two nodes on one host; ports of their metrics, the coordinator's node first."""
    flags, ports = nodes(2, free_port()), [free_port(), free_port()]
    for port in ports:
        job.start(*flags, "--metrics-port", str(port))
    job.running(4)
    job.wait(lambda: all(of_node_step(scrape(port)) for port in ports))
    return sorted(ports, key=lambda port: of(scrape(port), "resihp_epoch") is None)


def of_node_step(found: Figures) -> float:
    return next((value for (name, _), value in found.items() if name == "resihp_node_step"), 0.0)


def test_every_agent_tells_its_node_and_one_the_job(job: Job) -> None:
    host, guest = start(job)
    found = scrape(host)
    assert of(found, "resihp_phase", "running") == 1
    assert of(found, "resihp_ranks", "member") == 4
    assert of(found, "resihp_nodes") == 2
    assert of(found, "resihp_lost_total", "signal") == 0
    job.wait(lambda: (of(scrape(host), "resihp_step_seconds") or 0) > 0)
    # A worker's step takes 20 ms, and more where cores are busy.
    assert 0.02 <= (of(scrape(host), "resihp_step_seconds") or 0) < 0.5
    ages_s = [v for (name, _), v in found.items() if name == "resihp_heartbeat_age_seconds"]
    assert len(ages_s) == 2
    assert max(ages_s) < 5.0
    assert not [name for name, _ in scrape(guest) if name.startswith("resihp_step")]
    names = {label for name, labels in scrape(guest) for label in labels if "node_step" in name}
    assert names < set(json.loads(job.status())["nodes"])

    pid = job.events(1, "start")[-1].pid
    kill(pid)
    job.wait(lambda: of(scrape(host), "resihp_recovery_seconds_count") == 1)
    job.whole(4)
    found = scrape(host)
    assert of(found, "resihp_lost_total", "signal") == 1
    assert of(found, "resihp_recoveries_total") == 1
    assert 0 < (of(found, "resihp_recovery_seconds_sum") or 0) < 30
    with socket.socket() as stranger:  # speaks no HTTP, and goes
        stranger.connect(("127.0.0.1", host))
        stranger.sendall(b"\x16\x03\x01\x02garbage\r\n\r\n")
    assert of(scrape(host), "resihp_epoch") == json.loads(job.status())["epoch"]
    assert [(code, err.count("\n")) for code, _, err in job.finish()] in (
        [(0, 1), (0, 0)],
        [(0, 0), (0, 1)],
    ), "nothing but the line about the death"
    assert scrape(host) == {}


def test_a_taken_port_is_one_line_and_exit_code_2(job: Job) -> None:
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        job.start("--nproc-per-node", "2", "--metrics-port", str(port))
        ((code, _, err),) = job.finish()
    assert code == 2
    assert err.splitlines() == [
        f"error: resihp-run: metrics at 127.0.0.1 port {port}: Address already in use; "
        "give another --metrics-port or --metrics-host, or none"
    ]
    assert job.events(0) == []


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the program prometheus")
def test_prometheus_itself_scrapes_a_job(job: Job, tmp_path: Path) -> None:
    ports, own = start(job), free_port()
    targets = [f"127.0.0.1:{port}" for port in ports]
    config = {
        "scrape_configs": [
            {
                "job_name": "resihp",
                "scrape_interval": "1s",
                "static_configs": [{"targets": targets}],
            }
        ]
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    words = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    server = subprocess.Popen(
        ["prometheus", *words, f"--web.listen-address=127.0.0.1:{own}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def asked(query: str) -> list[float]:
        where = f"http://127.0.0.1:{own}/api/v1/query?" + urllib.parse.urlencode({"query": query})
        try:
            with urllib.request.urlopen(where, timeout=10) as answer:
                found = json.loads(answer.read())
        except (urllib.error.URLError, ConnectionError):
            return []
        return [float(one["value"][1]) for one in found["data"]["result"]]

    try:
        job.wait(lambda: asked("sum(up)") == [2.0])
        job.wait(lambda: asked('resihp_ranks{state="member"}') == [4.0])
        job.wait(lambda: asked("rate(resihp_step[10s]) > 0") != [])
        kill(job.events(1, "start")[-1].pid)
        job.wait(lambda: asked('resihp_lost_total{kind="signal"}') == [1.0])
        job.wait(lambda: asked("resihp_recovery_seconds_count") == [1.0])
        time.sleep(2.0)
        # An instant query would show nothing of a scrape whose text was refused.
        assert asked('sum(up{job="resihp"})') == [2.0]
        job.whole(4)
    finally:
        server.terminate()
        server.wait(LIMIT_S)
    assert [code for code, _, _ in job.finish()] == [0, 0]
