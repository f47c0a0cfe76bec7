"""What a machine with one GPU can show: NCCL with one rank, and four ranks sharing the GPU.

The CPU run of the same job is the reference: same initial weights, same data.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import Trial, max_rel_diff, run_trial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

HAS_GPU_ENGINE = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0),
    reason="flash attention needs compute capability 8.0",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "data", documents=150)


def job(data: Path, device: str, *extra: str, world_size: int = 1) -> Trial:
    words = ["--preset", "tiny", "--device", device, "--data-path", str(data)]
    words += ["--split", "100,0,0", "--train-iters", "5", "--eval-iters", "0", "--clip-grad", "0.5"]
    words += ["--global-batch-size", "8", "--seq-length", "128", "--packed-sequences"]
    if device == "cuda":
        words += ["--preset", "local"]
    return run_trial([*words, *extra], world_size=world_size)


@pytest.fixture(scope="module")
def reference(data: Path) -> Trial:
    return job(data, "cpu")


def test_one_rank_over_nccl(data: Path, reference: Trial) -> None:
    trial = job(data, "cuda", "--distributed-backend", "nccl")
    start = next(event for event in trial.events if event["event"] == "job_start")
    assert start["device"]["kind"] == "cuda"
    # Another device sums in another order; fp32 without TF32 stays within 1e-4 over five steps.
    assert max_rel_diff(trial.losses, reference.losses) <= 1e-4
    assert max_rel_diff(trial.grad_norms, reference.grad_norms) <= 1e-3


def test_four_ranks_share_the_gpu_over_gloo(data: Path, reference: Trial) -> None:
    gloo = ("--distributed-backend", "gloo", "--tensor-model-parallel-size", "2")
    trial = job(data, "cuda", *gloo, world_size=4)
    assert max_rel_diff(trial.losses, reference.losses) <= 1e-4
    assert max_rel_diff(trial.grad_norms, reference.grad_norms) <= 1e-3


@HAS_GPU_ENGINE
def test_half_precision_uses_flash_attention(data: Path, reference: Trial) -> None:
    trial = job(data, "cuda", "--distributed-backend", "nccl", "--bf16")
    assert max_rel_diff(trial.losses, reference.losses) <= 3e-2
    assert trial.losses[-1] < trial.losses[0]
