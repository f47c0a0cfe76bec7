"""Flags that do not go with layouts of our own are refused at the start, each by its name."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron.resilience.executor.limits import refuse
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit

PLAIN = {
    "context_parallel_size": 1,
    "optimizer": "adam",
    "cuda_graph_impl": "none",
    "ckpt_format": "torch_dist",
    "non_persistent_ckpt_type": None,
}


@pytest.mark.parametrize(
    ("name", "value", "flag"),
    [
        ("async_save", True, "--async-save"),
        ("ckpt_assume_constant_structure", True, "--ckpt-assume-constant-structure"),
        ("non_persistent_ckpt_type", "local", "--non-persistent-ckpt-type local"),
        ("log_straggler", True, "--log-straggler"),
        ("wandb_project", "mine", "--wandb-project"),
        ("rampup_batch_size", [4, 4, 100], "--rampup-batch-size"),
    ],
)
def test_a_flag_that_does_not_survive_deaths_is_named(name: str, value: Any, flag: str) -> None:
    with pytest.raises(UserError) as caught:
        refuse(argparse.Namespace(**{**PLAIN, name: value}), "logical")
    line = str(caught.value)
    assert line.startswith(f"{flag}")
    assert line.endswith(": cannot be combined with --resilience")
    assert "\n" not in line


def test_an_ordinary_job_is_not_refused() -> None:
    refuse(argparse.Namespace(**PLAIN), "logical")
