"""Collectives of Megatron's tensor-parallel layers are waits, while an action is timed.

A group of one rank, in this very process: what is asked is which calls are seen.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.resilience.patches.registry import PatchSet
from megatron.resilience.timing.clock import StepClock
from resihp_ext.detector.timed import RankStep
from resihp_ext.plan.action import Kind

pytestmark = pytest.mark.unit

LAYERS = "megatron.core.tensor_parallel.layers"
MAPPINGS = "megatron.core.tensor_parallel.mappings"
UTILS = "megatron.core.tensor_parallel.utils"
CROSS_ENTROPY = "megatron.core.tensor_parallel.cross_entropy"
FUSED = "megatron.core.fusions.fused_cross_entropy"


class Counted:
    """A clock that moves by a second at each look, so that waits can be counted."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.steps: list[RankStep] = []
        self.clock = StepClock(0, now_s=self._tick)
        self.clock.on_step.append(self.steps.append)

    def _tick(self) -> float:
        self.now_s += 1.0
        return self.now_s

    def waits_in(self, kind: Kind, work: Callable[[], Any]) -> int:
        self.clock.restart(1, 1)
        self.clock.begin(kind, 0 if kind is not Kind.SYNC else -1)
        work()
        self.clock.finish()
        return int(self.steps[-1].actions[0].wait_s)


@pytest.fixture
def counted() -> Iterator[Counted]:
    patches = PatchSet()
    patches.apply_for("cpu")
    found = Counted()
    patches.partner_waits.clock = found.clock
    timeout = timedelta(seconds=10)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    yield found
    dist.destroy_process_group()
    patches.undo_all()


def reduce_in(module: str, **kwargs: Any) -> Any:
    """As code of that module does it: by the name ``torch`` that it sees."""
    named = importlib.import_module(module).torch
    return named.distributed.all_reduce(torch.ones(2), **kwargs)


@pytest.mark.parametrize("module", [LAYERS, MAPPINGS, CROSS_ENTROPY, FUSED])
def test_reductions_are_waits(counted: Counted, module: str) -> None:
    assert counted.waits_in(Kind.FORWARD, lambda: reduce_in(module)) == 1
    assert counted.waits_in(Kind.WEIGHT, lambda: (reduce_in(module), reduce_in(module))) == 2


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (LAYERS, "dist_all_gather_func"),
        (LAYERS, "dist_reduce_scatter_func"),
        (MAPPINGS, "dist_all_gather_func"),
        (MAPPINGS, "dist_reduce_scatter_func"),
        (UTILS, "dist_all_gather_func"),
    ],
)
def test_names_that_are_bound_at_import(counted: Counted, module: str, name: str) -> None:
    function = getattr(importlib.import_module(module), name)
    assert counted.waits_in(Kind.FORWARD, lambda: function(torch.ones(2), torch.ones(2))) == 1


def test_a_collective_in_the_background_is_waited_for_later(counted: Counted) -> None:
    def work() -> None:
        handle = reduce_in(LAYERS, async_op=True)
        assert counted.now_s == before_s + 3, "posting is own work"
        handle.wait()
        assert handle.is_completed()

    before_s = counted.now_s
    assert counted.waits_in(Kind.BACKWARD, work) == 1


def test_other_actions_and_passes_are_not_touched(counted: Counted) -> None:
    assert counted.waits_in(Kind.SYNC, lambda: reduce_in(LAYERS)) == 0
    before_s = counted.now_s
    reduce_in(LAYERS)
    reduce_in(LAYERS, async_op=True).wait()
    assert counted.now_s == before_s


def test_a_group_without_partners_is_not_waited_for(counted: Counted) -> None:
    alone = dist.group.WORLD
    assert counted.waits_in(Kind.FORWARD, lambda: reduce_in(LAYERS, group=alone)) == 0


def test_it_leaves_no_trace() -> None:
    modules = [importlib.import_module(name) for name in (LAYERS, MAPPINGS)]
    before = [dist.all_reduce, *(module.dist_all_gather_func for module in modules)]
    patches = PatchSet()
    patches.apply_for("cpu")
    assert dist.all_reduce is not before[0]
    patches.undo_all()
    assert [dist.all_reduce, *(module.dist_all_gather_func for module in modules)] == before
