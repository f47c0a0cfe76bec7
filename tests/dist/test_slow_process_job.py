"""A rank whose process gets half of its time on the CPU is named, and nobody is in a healthy job.

Nothing is emulated: two replicas of one rank, each on a core and a node of its own (of two devices
of one node, the detector may suspect the node). Other work on the machine is slowness, too: what a
run with much of it says proves nothing, and is skipped.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from slow_jobs import OthersLoad, needs_quota, start_nodes

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.parity import MODEL
from resihp_ext.brake.cpu_tree import find_cpu_tree

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,  # real timings: a machine that others use decides what is seen
    pytest.mark.timeout(300),
    needs_quota,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of 2 ranks"),
]

STEPS, SLOW_FROM, SLOW_RANK = 36, 21, 1
FAULTS = f"[{{at_step: {SLOW_FROM}, kind: slow, rank: {SLOW_RANK}, factor: 0.5, by: quota}}]"
# Actions of 20 to 50 ms: much longer than the quota's period.
LARGER = ["--hidden-size", "240", "--ffn-hidden-size", "720", "--seq-length", "192"]
OTHERS_CORES = 0.3
"""Work of others for a second: from there on a machine of two cores is not two healthy devices."""


@dataclass(frozen=True)
class Said:
    """What a job has written about slowness."""

    named: list[str]
    faults: list[str]
    others_cores: float

    def judge(self, right: bool) -> None:
        """Fails what is wrong, unless others have been working meanwhile."""
        if not right and self.others_cores > OTHERS_CORES:
            pytest.skip(f"others had {self.others_cores:.2f} cores for a second: {self.named}")
        assert right, self


def run(folder: Path, *more: str) -> Said:
    data = write_corpus(folder / "data", documents=300)
    words = [*MODEL, *LARGER, "--data-path", str(data), "--device", "cpu", *more]
    words += ["--train-iters", str(STEPS), "--global-batch-size", "4", "--resilience"]
    words += ["--resilience-dir", str(folder / "resilience"), "--resilience-detect", "observe"]
    nodes = start_nodes(folder, words, per_node=1)
    try:
        with OthersLoad([node.pid for node in nodes]) as others:
            told = "".join(node.communicate(timeout=200)[1] for node in nodes)
    finally:
        for node in nodes:
            node.kill()
    assert [node.returncode for node in nodes] == [0, 0], told[-3000:]
    lines = [line for line in told.splitlines() if line.startswith("resihp: ")]
    faults = [line for line in lines if line.startswith("resihp: fault")]
    named = [line for line in lines if line not in faults]
    tree = find_cpu_tree()
    assert tree is not None
    assert not [one for one in tree.own.glob("resihp-*") if not alive(one)], "groups are left"
    return Said(named, faults, others.worst_cores)


def alive(group: Path) -> bool:
    return Path(f"/proc/{group.name.removeprefix('resihp-')}").exists()


def test_a_throttled_process_is_named(tmp_path: Path) -> None:
    (tmp_path / "faults.yaml").write_text(FAULTS)
    said = run(tmp_path, "--resilience-faults", str(tmp_path / "faults.yaml"))
    expected = f"rank {SLOW_RANK} keeps 0.5 of its speed by quota from step {SLOW_FROM} on"
    assert said.faults[0] == f"resihp: fault: {expected}"
    pattern = rf"resihp: rank {SLOW_RANK} \(node .*\) works at (0\.\d+) of .* since step (\d+)"
    lines = [re.match(pattern, line) for line in said.named]
    right = len(lines) == 1 and lines[0] is not None
    said.judge(right)
    assert lines[0] is not None
    assert 0.3 < float(lines[0][1]) < 0.75
    # Where it began is an estimate, at times some steps early.
    assert SLOW_FROM - 10 <= int(lines[0][2]) <= SLOW_FROM + 2


def test_without_a_fault_nobody_is_named(tmp_path: Path) -> None:
    said = run(tmp_path)
    assert said.faults == []
    said.judge(said.named == [])
