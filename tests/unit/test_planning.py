"""From a brief and the devices that are left to a plan."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from problems import GB, layout, tps_of

from resihp_ext.control.actions import NeedPlan
from resihp_ext.control.planning import Brief, plain, plan_for, with_version
from resihp_ext.control.worth import Terms
from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import MODELS, ModelShape
from resihp_ext.emulation.prices import Prices
from resihp_ext.emulation.scene import scene_from_yaml
from resihp_ext.errors import UserError
from resihp_ext.plan.action import Action, Kind
from resihp_ext.plan.check import checked
from resihp_ext.plan.plan import Instance, Plan, uniform_plan
from resihp_ext.plan.schedule import one_forward_one_backward

pytestmark = pytest.mark.unit

CPU = MemoryPolicy(param_bytes=4, master_bytes=0, fused=False)
NOMINAL = layout(2, 2, 2, layers=4, micro_batches=8)
TINY = Brief(
    shape=replace(MODELS["tiny"], seq_length=256),
    policy=CPU,
    memory_bytes=GB,
    nominal=NOMINAL,
    hardware="cpu",
)


def need(
    brief: Brief, lost: Collection[int] = (), plan: Plan | None = None, **changes: Any
) -> NeedPlan:
    current = plan or brief.nominal
    devices = tuple((one.rank, one.node, one.rank not in lost) for one in current.devices)
    fields = {"request": "epoch 1", "devices": devices, "problem": brief.to_json(), "version": 5}
    return NeedPlan(**{**fields, "plan": current.to_json(), **changes})


def test_a_brief_survives_its_json() -> None:
    assert Brief.from_json(TINY.to_json()) == TINY
    shorter = json.loads(TINY.to_json())
    del shorter["options"], shorter["profile"]
    assert Brief.from_json(json.dumps(shorter)) == TINY


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hardware": "abacus"}, "hardware 'abacus': choose one of a100, h100, h200, cpu"),
        ({"hardware": ""}, "give either a preset of costs"),
        ({"memory_bytes": 0}, "memory of a device, 0 bytes"),
        ({"memory_bytes": "much"}, "brief: invalid literal"),
        ({"nominal": "{}"}, "not the JSON form of a plan"),
        ({"nominal": layout(1, 1, 1, layers=3).to_json()}, "the plan has 3 layers, the model 4"),
        ({"shape": {"name": "x"}}, "missing"),
        ({"policy": {"bytes": 3}}, "unexpected keyword argument 'bytes'"),
        ({"options": {"delta": 0}}, "must be at least 1"),
        ({"hardware": "", "profile": "{}"}, "profile of the job: KeyError('format')"),
        ({"colour": "red"}, "unknown fields colour"),
    ],
)
def test_what_is_wrong_with_a_brief_is_one_line(changes: dict[str, Any], words: str) -> None:
    text = json.dumps({**json.loads(TINY.to_json()), **changes})
    with pytest.raises(UserError, match=r"^(brief|profile|delta)") as caught:
        assert Brief.from_json(text).cost
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", "{]"])
def test_what_is_no_brief_at_all(text: str) -> None:
    with pytest.raises(UserError, match="brief: "):
        Brief.from_json(text)


@pytest.mark.parametrize("rank", range(8))
def test_every_single_loss_has_a_plan(rank: int) -> None:
    found = plan_for(need(TINY, {rank}))
    assert found == plan_for(need(TINY, {rank}))
    assert found.plan is not None
    plan = Plan.from_json(found.plan)
    assert plan.version == found.version == 5
    assert [one.rank for one in plan.devices] == list(range(8))
    assert {one.rank for one in plan.devices if not one.alive} == {rank}
    assert plan.micro_batches == 8
    checked(one_forward_one_backward(plan), plan)


def test_lost_devices_that_come_back_give_the_nominal_layout() -> None:
    first = plan_for(need(TINY, {3}))
    assert first.plan is not None
    back = plan_for(need(TINY, (), Plan.from_json(first.plan), version=6))
    assert back.plan is not None
    plan = Plan.from_json(back.plan)
    assert (plan.replicas, plan.version) == (NOMINAL.replicas, 6)


def test_a_plan_that_stays_names_the_newcomers() -> None:
    more = replace(NOMINAL, devices=layout(2, 2, 2, layers=4, spares=2).devices)
    found = plan_for(replace(need(TINY, (), more), plan=NOMINAL.to_json()))
    assert found.plan is not None
    plan = Plan.from_json(found.plan)
    assert len(plan.devices) == 10
    assert plan.version == 5


def test_without_a_plan_there_is_a_reason() -> None:
    tight = replace(TINY, memory_bytes=10 * 10**6)
    found = plan_for(need(tight, {1, 2, 3, 4, 5}))
    assert found.plan is None
    assert found.why.startswith("no plan for 3 live of 8 devices")
    assert plan_for(need(TINY, range(8))).why == "no plan: none of 8 devices is alive"


def test_questions_that_make_no_sense_have_a_reason_too() -> None:
    assert plan_for(need(TINY, problem="{")).why.startswith("brief: ")
    assert plan_for(replace(need(TINY), plan="x")).why.startswith("not the JSON form of a plan")
    fewer = replace(need(TINY), devices=need(TINY).devices[:6])
    assert "ranks [6, 7] are not in the cluster" in plan_for(fewer).why


def test_the_same_answer_with_another_version() -> None:
    found = plan_for(need(TINY, {3}))
    assert with_version(found, 9) == plan_for(need(TINY, {3}, version=9))


def test_sequence_parallelism_excludes_degrees() -> None:
    """Three of four devices are left: the model divides by 3, its sequences do not."""
    shape = ModelShape(
        name="threes",
        num_layers=4,
        hidden_size=768,
        ffn_hidden_size=1536,
        attention_heads=12,
        query_groups=12,
        vocab_size=768,
        seq_length=512,
    )
    nominal = layout(4, 1, 1, layers=4, micro_batches=4)
    brief = replace(TINY, shape=shape, nominal=nominal)
    found = plan_for(need(brief, {3})).plan
    assert found is not None
    assert tps_of(Plan.from_json(found)) == [(3,)]
    divided = replace(brief, policy=replace(CPU, sequence_parallel=True))
    for planner in ("joint", "progressive"):
        found = plan_for(need(divided, {3}), planner).plan
        assert found is not None
        assert {tp for one in tps_of(Plan.from_json(found)) for tp in one} <= {1, 2, 4}


def test_virtual_stages_are_planned_for_without() -> None:
    virtual = uniform_plan(num_layers=4, tp=2, pp=2, dp=2, virtual=2, micro_batches=8)
    assert plain(virtual) == NOMINAL
    assert plain(NOMINAL) is NOMINAL
    brief = replace(TINY, nominal=virtual)
    found = plan_for(need(brief, {3})).plan
    assert found is not None
    assert found == plan_for(need(TINY, {3})).plan


def test_an_emulated_job_is_planned_with_the_times_of_the_large_model() -> None:
    scene = scene_from_yaml("{model: llama2-7b, hardware: a100, time_scale: 1.0}", "scene")
    brief = replace(TINY, hardware="a100", emulated=scene.shape, act=Terms(), last_step=9)
    assert Brief.from_json(brief.to_json()) == brief
    paced = Prices(scene, NOMINAL, brief.shape.seq_length, CPU)
    planned = brief.cost.cost(NOMINAL, brief.shape, policy=CPU)
    for stage in (0, 1):
        for kind in (Kind.FORWARD, Kind.BACKWARD):
            here, action = Instance(replica=0, stage=stage), Action(kind=kind, micro_batch=0)
            assert planned(here, action) == pytest.approx(paced.seconds(here, action), rel=1e-6)


def test_the_answer_says_what_a_step_takes_now_and_then() -> None:
    brief = replace(TINY, hardware="a100", emulated=MODELS["llama2-7b"])
    healthy = plan_for(need(brief))
    assert healthy.now_s == pytest.approx(healthy.then_s)
    asked = need(brief)
    devices = tuple((r, n, 0.5 if r == 3 else 1.0) for r, n, _ in asked.devices)
    slow = plan_for(replace(asked, devices=devices))
    assert healthy.now_s < slow.then_s < 0.8 * slow.now_s
    assert slow.now_s == pytest.approx(2 * healthy.now_s, rel=0.2)
    assert {d.rank: d.p for d in Plan.from_json(slow.plan or "").devices}[3] == 0.5
    lost = plan_for(need(brief, {3}))
    assert (lost.now_s, lost.then_s > 0) == (0.0, True)
