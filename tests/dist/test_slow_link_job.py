"""A slow network between two nodes of a real job: its messages come later, and a death among them
is survived as ever."""

from __future__ import annotations

import socket
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import pytest
from slow_jobs import start_nodes

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.parity import MODEL
from resihp_ext.detector.timed import RankStep
from resihp_ext.events import Event, read_events
from resihp_ext.plan.action import RECEIVES

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(240)]

STEPS, SLOW_FROM, HEALTHY_FROM, DELAY_S = 14, 5, 11, 0.05
HOST = socket.gethostname()[:56]
LINK = (
    f"- {{at_step: {SLOW_FROM}, until_step: {HEALTHY_FROM}, link: [{HOST}, {HOST}.1], "
    f"kind: slow_link, delay_ms: {1000 * DELAY_S:g}}}\n"
)


def run(folder: Path, faults: str, per_node: int) -> list[dict[str, Any]]:
    """A job of two stages on two nodes, which share this machine; gives its events."""
    (folder / "faults.yaml").write_text(faults)
    data = write_corpus(folder / "data", documents=150)
    words = [*MODEL, "--data-path", str(data), "--device", "cpu", "--train-iters", str(STEPS)]
    words += ["--global-batch-size", "4", "--pipeline-model-parallel-size", "2", "--resilience"]
    words += ["--resilience-dir", str(folder / "resilience"), "--resilience-timings-steps", "1"]
    words += ["--resilience-faults", str(folder / "faults.yaml")]
    nodes = start_nodes(folder, words, per_node=per_node)
    try:
        said = [node.communicate(timeout=200)[1] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], "".join(said)[-3000:]
    return read_events(folder / "resilience" / "events.jsonl")


def test_messages_come_later_while_the_link_is_slow(tmp_path: Path) -> None:
    waits_s: dict[int, float] = defaultdict(float)
    for event in run(tmp_path, LINK, per_node=1):
        if event["event"] == Event.STEP_TIMES:
            times = msgspec.convert(event["times"], RankStep)
            # Two messages a step are not hidden behind work: the first each way.
            waits_s[times.step] += sum(one.wait_s for one in times.actions if one.kind in RECEIVES)
    slow_s = [waits_s[step] for step in range(SLOW_FROM, HEALTHY_FROM)]
    healthy_s = [waits_s[step] for step in (3, 4, *range(HEALTHY_FROM + 1, STEPS + 1))]
    assert min(slow_s) > 2 * DELAY_S, (slow_s, healthy_s)
    assert median(slow_s) > median(healthy_s) + 1.5 * DELAY_S, (slow_s, healthy_s)


def test_a_death_while_messages_are_held_back(tmp_path: Path) -> None:
    kill = f"- {{at_step: {SLOW_FROM + 2}, phase: p2p, micro_batch: 1, rank: 3, kind: kill}}\n"
    events = run(tmp_path, LINK + kill, per_node=2)
    done = [event["step"] for event in events if event["event"] == Event.ITERATION]
    assert done == list(range(1, STEPS + 1))
    assert any(event["event"] == Event.TRANSITION for event in events)
