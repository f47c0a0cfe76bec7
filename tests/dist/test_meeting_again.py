"""Ranks that are all started anew meet, in a store that still has what those before have left."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.resilience.executor.world import World
from megatron.resilience.upstream.resume import job_store
from resihp_ext.environment import RankEnvironment
from resihp_ext.testing.ranks import run_ranks

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


def meet_after_one_was_broken_off() -> float:
    """The second world of rank 1, and the third of rank 0, which nobody else came to before."""
    rank = RankEnvironment.from_environ(os.environ)
    store = job_store(rank)
    if rank.rank == 0:
        with pytest.raises(RuntimeError):
            World(members=(0, 1), epoch=1).connect(
                0, backend="gloo", store=store, timeout=timedelta(seconds=0.2)
            )
    World(members=(0, 1), epoch=2).connect(
        rank.rank, backend="gloo", store=store, timeout=timedelta(seconds=20)
    )
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return float(total)


def test_a_rank_meets_the_others_after_making_a_group_in_vain() -> None:
    assert run_ranks(2, meet_after_one_was_broken_off, timeout_s=60.0) == [2.0, 2.0]
