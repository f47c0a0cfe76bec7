"""Ranks that are all started anew meet, in a store that still has what those before have left."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

WORKER = """
import os, sys
import torch, torch.distributed as dist
from megatron.resilience.upstream.resume import job_store
from resihp_ext.control.worker_environment import WorkerEnvironment
from resihp_ext.environment import RankEnvironment

rank, agent = (one.from_environ(os.environ) for one in (RankEnvironment, WorkerEnvironment))
store = job_store(rank, agent.attempt)
dist.init_process_group("gloo", store=store, rank=rank.rank, world_size=rank.world_size)
if rank.rank == 1 and agent.attempt == 1:
    os._exit(7)
total = torch.ones(1)
dist.all_reduce(total)
if rank.rank == 0:
    print(f"met {total.item():g} in start {agent.attempt}", flush=True)
dist.destroy_process_group()
"""


def test_all_meet_again_after_a_death_before_the_first_step(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    launcher = [sys.executable, "-m", "resihp_ext.launcher.run", "--nproc-per-node", "2"]
    launcher += ["--max-restarts", "1"]
    found = subprocess.run(
        [*launcher, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert "met 2 in start 2" in found.stdout
