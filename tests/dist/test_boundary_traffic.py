"""Between stages of different tensor-parallel degrees one copy crosses: counted in a job."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.resilience.testing.corpus import write_corpus
from megatron.resilience.testing.trial import run_trial
from resihp_ext.plan.plan import Device, Plan, Replica, Stage
from resihp_ext.plan.timetable import straight_routes

pytestmark = pytest.mark.dist

SEQUENCE, HIDDEN, MICRO_BATCHES, STEPS = 96, 96, 4, 2
SHAPE = ["--num-attention-heads", "6", "--num-query-groups", "6", "--ffn-hidden-size", "192"]
SHAPE += ["--hidden-size", str(HIDDEN), "--seq-length", str(SEQUENCE), "--num-layers", "3"]


def plan_of(degrees: list[int]) -> Plan:
    """One replica, a layer a stage, each stage on a node of its own."""
    ranks = iter(range(sum(degrees)))
    groups = [tuple(next(ranks) for _ in range(degree)) for degree in degrees]
    replicas = (
        Replica(stages=tuple(Stage(ranks=one, layers=(k, k + 1)) for k, one in enumerate(groups))),
    )
    devices = tuple(Device(rank=r, node=k) for k, one in enumerate(groups) for r in one)
    routes = straight_routes(replicas, None, MICRO_BATCHES)
    return Plan(version=0, num_layers=3, devices=devices, replicas=replicas, routes=routes)


@pytest.mark.parametrize("parallel", [[], ["--sequence-parallel"]])
def test_one_copy_crosses_between_nodes(tmp_path: Path, parallel: list[str]) -> None:
    plan = plan_of([3, 2, 1]).validated()
    (tmp_path / "plan.json").write_text(plan.to_json())
    timetable = tmp_path / "timetable.yaml"
    timetable.write_text(json.dumps([{"step": 0, "plan": "plan.json"}]))
    words = ["--preset", "tiny", "--data-path", str(write_corpus(tmp_path / "data", seed=3))]
    words += ["--split", "100,0,0", "--train-iters", str(STEPS), "--eval-iters", "0", *SHAPE]
    words += ["--global-batch-size", str(MICRO_BATCHES), *parallel]
    trial = run_trial([*words, "--resilience-plan-schedule", str(timetable)], world_size=6)
    ends = {event["rank"]: event for event in trial.events if event["event"] == "job_end"}
    assert set(ends) == set(range(6))
    tensor_bytes = SEQUENCE * HIDDEN * 4
    for stage in (0, 1, 2):
        sent = [ends[rank]["between_nodes_bytes"] for rank in plan.replicas[0].stages[stage].ranks]
        directions = 2 if stage == 1 else 1
        assert sum(sent) == directions * MICRO_BATCHES * STEPS * tensor_bytes, (stage, sent)
        # Spread evenly over the ranks of the stage, to within a row.
        assert max(sent) - min(sent) <= directions * MICRO_BATCHES * STEPS * HIDDEN * 4
    assert all(end["sent_bytes"] == end["between_nodes_bytes"] for end in ends.values())


def test_nothing_crosses_nodes_inside_one(tmp_path: Path) -> None:
    plan = plan_of([2, 1, 1])
    plan = replace(plan, devices=tuple(replace(one, node=0) for one in plan.devices))
    (tmp_path / "plan.json").write_text(plan.to_json())
    timetable = tmp_path / "timetable.yaml"
    timetable.write_text(json.dumps([{"step": 0, "plan": "plan.json"}]))
    words = ["--preset", "tiny", "--data-path", str(write_corpus(tmp_path / "data", seed=3))]
    words += ["--split", "100,0,0", "--train-iters", "1", "--eval-iters", "0", *SHAPE]
    words += ["--global-batch-size", str(MICRO_BATCHES)]
    trial = run_trial([*words, "--resilience-plan-schedule", str(timetable)], world_size=4)
    ends = [event for event in trial.events if event["event"] == "job_end"]
    assert all(end["between_nodes_bytes"] == 0 for end in ends)
    assert sum(end["sent_bytes"] for end in ends) == 4 * MICRO_BATCHES * SEQUENCE * HIDDEN * 4
