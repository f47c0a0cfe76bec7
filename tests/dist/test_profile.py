"""``resihp profile`` on this machine, and the memory model inside tensor-parallel groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed

from megatron.resilience.cli.main import main
from megatron.resilience.testing.trial import PRELOAD
from resihp_ext.cost.cost_model import from_profile
from resihp_ext.cost.memory import MemoryPolicy, stage_memory
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.testing.ranks import preload, run_ranks

pytestmark = pytest.mark.dist

TINY = MODELS["tiny"]
PROFILE = [sys.executable, "-m", "megatron.resilience.cli.main", "profile", "--quick"]
QUICK_LIMIT_S = 110
"""About 10 s on two idle cores; the suite may share them."""
MOST_MAPE_PERCENT = 50
"""2 to 8 % on an idle machine."""


def test_profile_measures_what_the_cost_model_reads(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    ended = subprocess.run(
        [*PROFILE, "--device", "cpu", "--out", str(path)],
        capture_output=True,
        text=True,
        timeout=QUICK_LIMIT_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith(f"wrote {path}\n")
    fields = json.loads(path.read_text())
    degrees = [layer["tp"] for layer in fields["layers"]]
    assert degrees == ([1, 2] if len(os.sched_getaffinity(0)) > 1 else [1])
    errors = [each for one in fields["notes"]["mape_percent"].values() for each in one.values()]
    assert len(errors) == 2 * len(degrees)
    assert max(errors) < MOST_MAPE_PERCENT
    # A row a degree and direction, between what was measured and the link.
    assert len(ended.stdout.splitlines()) == 4 + 2 * len(degrees)
    model = from_profile(path)
    forward_s = model.forward_s(TINY, layers=1, tp=1)
    # A layer of 1024 tokens and 128 channels: 0.6 GFLOP; a core does between 1 and 200 a second.
    assert 0.003 < forward_s < 0.6
    packed_s = model.forward_s(TINY, layers=1, tp=1, squared=16 * 64**2)
    assert packed_s < forward_s
    assert 1e-10 < model.step_parameter_s < 1e-6
    assert model.inside.bytes_per_s > 1e6


def test_profile_of_one_degree_and_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    preload(PRELOAD)
    path = tmp_path / "profile.json"
    asked = ["--device", "cpu", "--quick", "--tp", "1", "--seq-length", "128"]
    assert main(["profile", *asked, "--out", str(path)]) == 0
    fields = json.loads(path.read_text())
    assert [layer["tp"] for layer in fields["layers"]] == [1]
    assert fields["model"]["seq_length"] == 128
    assert f"wrote {path}" in capsys.readouterr().out


def count_bytes(sequence_parallel: bool) -> tuple[int, int]:
    """Runs in a rank: parameters and what autograd keeps of one forward, in bytes."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.resilience.patches.registry import PatchSet
    from megatron.resilience.profile.model import build, packed

    torch.set_num_threads(1)
    PatchSet().apply_for("cpu")
    distributed.init_process_group("gloo")
    # Under sequence parallelism upstream gathers into a buffer of its own, and enters its random
    # state for dropout, also where there is none.
    parallel_state._set_global_memory_buffer()
    seeds = {"tp_rank": distributed.get_rank(), "ep_rank": 0, "etp_rank": 0}
    model_parallel_cuda_manual_seed(1, force_reset_rng=True, **seeds)
    alone = [distributed.new_group([rank]) for rank in range(distributed.get_world_size())]
    device = torch.device("cpu")
    model = build(
        TINY,
        group=distributed.group.WORLD,
        alone=alone[distributed.get_rank()],
        device=device,
        dtype=torch.float32,
        sequence_parallel=sequence_parallel,
    )
    parameters = {p.untyped_storage().data_ptr(): p for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = torch.zeros(1, TINY.seq_length, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(
            tokens,
            torch.arange(TINY.seq_length)[None],
            None,
            labels=tokens,
            packed_seq_params=packed([600, 424], device),
        )
    assert loss.requires_grad
    activations = [t for at, t in kept.items() if at not in parameters]
    distributed.barrier()
    distributed.destroy_process_group()
    return (
        sum(p.nbytes for p in parameters.values()),
        sum(t.untyped_storage().nbytes() for t in activations),
    )


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["plain", "sequence parallel"])
@pytest.mark.parametrize("tp", [2, 4])
def test_memory_of_a_tensor_parallel_rank(tp: int, sequence_parallel: bool) -> None:
    preload(PRELOAD)
    policy = MemoryPolicy(
        param_bytes=4, master_bytes=0, fused=False, sequence_parallel=sequence_parallel
    )
    stage = stage_memory(TINY, policy, depth=TINY.num_layers, tp=tp, first=True, last=True)
    for parameters, activations in run_ranks(tp, count_bytes, sequence_parallel):
        assert parameters == stage.parameters
        assert stage.activations == pytest.approx(activations, rel=0.005)
