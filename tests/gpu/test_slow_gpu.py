"""A GPU on which kernels run beside the training keeps the part of its speed that it is left."""

from __future__ import annotations

import time
from statistics import median

import pytest
import torch

from megatron.resilience.device.co_kernel import CoKernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]


def work_s(device: torch.device) -> float:
    """Median time of a piece of work that is much longer than the brake's period."""
    matrix = torch.ones(4096, 4096, device=device)
    took_s = []
    for _ in range(7):
        torch.cuda.synchronize(device)
        begun_s = time.perf_counter()
        for _ in range(60):
            matrix = torch.mm(matrix, matrix).clamp_(max=1.0)
        torch.cuda.synchronize(device)
        took_s.append(time.perf_counter() - begun_s)
    return median(took_s)


@pytest.mark.parametrize("left", [0.5, 0.25])
def test_it_keeps_a_part_of_its_speed_and_gets_all_of_it_back(left: float) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    brake = CoKernel(device)
    before_s = work_s(device)
    brake.keep(left)
    slow_s = work_s(device)
    brake.keep(1.0)
    after_s = work_s(device)
    assert slow_s == pytest.approx(before_s / left, rel=0.4), (before_s, slow_s, after_s)
    assert after_s == pytest.approx(before_s, rel=0.2)
