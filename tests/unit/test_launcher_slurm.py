"""Slurm's variables as flags of torchrun: which, when, and when not."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from resihp_ext.errors import UserError
from resihp_ext.launcher.slurm import run_scontrol, slurm_defaults, take_slurm_defaults

pytestmark = pytest.mark.unit

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[007-009]",
}
FOUND = {
    "nnodes": "3",
    "rdzv_backend": "c10d",
    "rdzv_endpoint": f"10.1.0.7:{15000 + 4711 * 16 % 15000}",
    "rdzv_id": "slurm-4711.0.0",
    "rdzv_conf": "is_host=0",
}


def scontrol(*words: str) -> str:
    """As the real one answers; tests/dist/test_slurm.py asks that."""
    if words == ("show", "hostnames", "gpu[007-009]"):
        return "gpu007\ngpu008\ngpu009\n"
    assert words == ("show", "node", "--oneliner", "gpu007")
    return "NodeName=gpu007 Arch=x86_64 NodeAddr=10.1.0.7 NodeHostName=gpu007 Port=6818 State=IDLE"


def torchrun_args(*argv: str) -> Namespace:
    from torch.distributed.run import get_args_parser

    parsed: Namespace = get_args_parser().parse_args([*argv, "script.py"])
    return parsed


def changed(argv: list[str], environ: dict[str, str] = STEP) -> dict[str, Any]:
    before, after = torchrun_args(*argv), torchrun_args(*argv)
    take_slurm_defaults(after, environ, scontrol)
    return {name: value for name, value in vars(after).items() if vars(before)[name] != value}


def test_a_step_over_several_nodes_gives_everything() -> None:
    assert slurm_defaults(STEP, scontrol) == FOUND
    assert changed([]) == FOUND


def test_the_first_task_hosts_the_rendezvous() -> None:
    assert slurm_defaults(STEP | {"SLURM_PROCID": "0"}, scontrol)["rdzv_conf"] == "is_host=1"


def test_a_requeued_job_and_every_step_meet_apart() -> None:
    again = slurm_defaults(STEP | {"SLURM_RESTART_COUNT": "2"}, scontrol)
    other_step = slurm_defaults(STEP | {"SLURM_STEP_ID": "1"}, scontrol)
    assert again["rdzv_id"] == "slurm-4711.0.2"
    assert other_step["rdzv_id"] == "slurm-4711.1.0"
    assert other_step["rdzv_endpoint"] != FOUND["rdzv_endpoint"]


@pytest.mark.parametrize(
    "environ",
    [
        {},
        STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {name: value for name, value in STEP.items() if "STEP" not in name},  # a batch script
    ],
)
def test_elsewhere_nothing_changes(environ: dict[str, str]) -> None:
    assert changed([], environ) == {}


@pytest.mark.parametrize(
    "argv",
    [
        ["--standalone"],
        ["--nnodes", "1"],
        ["--nnodes", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1"],
        ["--nnodes", "3", "--rdzv-backend", "etcd-v2"],
        ["--nnodes", "3", "--node-rank", "1", "--master-addr", "h", "--master-port", "1"],
        ["--nnodes", "3", "--node-rank", "1"],
        ["--nnodes", "3", "--master-addr", "h"],
    ],
)
def test_a_rendezvous_of_the_users_stays(argv: list[str]) -> None:
    assert changed(argv) == {}


def test_what_the_user_gave_beside_it_stays() -> None:
    assert changed(["--nnodes", "1:2", "--rdzv-id", "mine", "--rdzv-conf", "read_timeout=5"]) == {
        "rdzv_backend": "c10d",
        "rdzv_endpoint": FOUND["rdzv_endpoint"],
        "rdzv_conf": "is_host=0,read_timeout=5",
    }


def test_several_tasks_a_node_are_a_mistake() -> None:
    with pytest.raises(UserError, match=r"24 tasks on 3 nodes.*--ntasks-per-node=1"):
        slurm_defaults(STEP | {"SLURM_STEP_NUM_TASKS": "24"}, scontrol)


def test_a_node_without_an_address_goes_by_its_name() -> None:
    found = slurm_defaults(STEP, lambda *words: "gpu007" if "hostnames" in words else "NodeName=x")
    assert found["rdzv_endpoint"].startswith("gpu007:")


def test_without_scontrol_the_line_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"not on PATH.*--rdzv-endpoint"):
        run_scontrol("show", "hostnames", "a")
    tool = tmp_path / "scontrol"
    tool.write_text("#!/bin/sh\necho 'slurm is away' >&2\nexit 1\n")
    tool.chmod(0o755)
    with pytest.raises(UserError, match=r"scontrol show node a: slurm is away; .*--rdzv-endpoint"):
        run_scontrol("show", "node", "a")
