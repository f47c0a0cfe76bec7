"""Plans: what is refused, what is derived, the JSON form, chunks, and Megatron's own grid."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from resihp_ext.plan.plan import Device, Instance, Plan, PlanError, Replica, Stage, uniform_plan

pytestmark = pytest.mark.unit

PLAN = uniform_plan(num_layers=4, tp=2, pp=2, dp=2, micro_batches=4)
CHUNKED = uniform_plan(num_layers=8, tp=2, pp=2, dp=2, micro_batches=4, virtual=2)


def at(replica: int, stage: int) -> Instance:
    return Instance(replica=replica, stage=stage)


def with_stages(plan: Plan, *stages: tuple[tuple[int, ...], tuple[int, int]]) -> Plan:
    """Puts other stages into replica 0; all micro-batches run there."""
    replica = Replica(stages=tuple(Stage(ranks=r, layers=layers) for r, layers in stages))
    route = tuple(at(0, stage) for stage in range(len(stages)))
    return replace(plan, replicas=(replica, *plan.replicas[1:]), routes=(route,))


def with_device(plan: Plan, device: Device) -> Plan:
    return replace(
        plan, devices=tuple(device if d.rank == device.rank else d for d in plan.devices)
    )


REFUSED = {
    "rank 0 is not a live device": with_device(PLAN, Device(rank=0, node=0, p=0.0)),
    "rank 99 is not a live device": with_stages(PLAN, ((99,), (0, 4))),
    "a global rank appears twice": replace(PLAN, devices=(*PLAN.devices, PLAN.devices[0])),
    "replica 0 stage 0 has no ranks": with_stages(PLAN, ((), (0, 4))),
    "replica 0 stage 0 names a rank twice": with_stages(PLAN, ((0, 0), (0, 4))),
    "rank 2 is in replica 0 stage 1 and in replica 1 stage 0": with_stages(
        PLAN, ((0, 1), (0, 2)), ((2, 3), (2, 4))
    ),
    "rank 1 is in replica 0 stage 0 and in replica 0 stage 1, with ranks (0, 1) and (1, 4)": (
        with_stages(PLAN, ((0, 1), (0, 2)), ((1, 4), (2, 4)))
    ),
    "with ranks (0, 1) and (1, 0)": with_stages(PLAN, ((0, 1), (0, 2)), ((1, 0), (2, 4))),
    "with ranks (0, 1) and (0,)": with_stages(PLAN, ((0, 1), (0, 2)), ((0,), (2, 4))),
    "layers [(0, 2), (3, 4)] do not cover": with_stages(PLAN, ((0,), (0, 2)), ((1,), (3, 4))),
    "layers [(0, 3)] do not cover 0..4": with_stages(PLAN, ((0,), (0, 3))),
    "a stage without layers: [0, 2, 2, 4]": with_stages(
        PLAN, ((0,), (0, 2)), ((1,), (2, 2)), ((4,), (2, 4))
    ),
    "no micro-batches": replace(PLAN, routes=()),
    "micro-batch 0 visits Instance(replica=2, stage=0), which does not exist": replace(
        PLAN, routes=((at(2, 0), at(0, 1)),)
    ),
    "micro-batch 0 visits Instance(replica=0, stage=2), which does not exist": replace(
        PLAN, routes=((at(0, 0), at(0, 2)),)
    ),
    "micro-batch 1 arrives at layer 0 but Instance(replica=0, stage=1) starts at layer 2": replace(
        PLAN, routes=(PLAN.routes[0], (at(0, 1), at(0, 0)))
    ),
    "micro-batch 0 ends after layer 2 of 4": replace(PLAN, routes=((at(0, 0),),)),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_no_plan(words: str) -> None:
    with pytest.raises(PlanError, match=re.escape(words)):
        REFUSED[words].validated()


def test_layers_and_micro_batches_must_divide() -> None:
    for sizes in ({"pp": 3}, {"dp": 3}, {"pp": 2, "virtual": 4}):
        with pytest.raises(PlanError, match="both must divide evenly"):
            uniform_plan(
                **{"num_layers": 4, "tp": 1, "pp": 1, "dp": 1, "micro_batches": 4, **sizes}
            )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", PLAN.to_json().replace("num_layers", "layers"), '{"version": "x"}'],
)
def test_what_is_no_json_form_of_a_plan(text: str) -> None:
    with pytest.raises(PlanError, match="not the JSON form of a plan"):
        Plan.from_json(text)


def test_the_json_form_is_canonical_and_the_digest_follows_it() -> None:
    text = PLAN.to_json()
    assert Plan.from_json(json.dumps(json.loads(text), indent=1)).to_json() == text
    assert PLAN.digest == Plan.from_json(text).digest
    later = PLAN.next_version(routes=PLAN.routes[:1])
    assert (later.version, later.micro_batches) == (1, 1)
    assert later.digest != PLAN.digest


def test_megatrons_grid_goes_tp_dp_pp() -> None:
    stages = [[(stage.ranks, stage.layers) for stage in one.stages] for one in PLAN.replicas]
    assert stages == [
        [((0, 1), (0, 2)), ((4, 5), (2, 4))],
        [((2, 3), (0, 2)), ((6, 7), (2, 4))],
    ]
    assert [route[0].replica for route in PLAN.routes] == [0, 1, 0, 1]


def test_virtual_stages_go_round_the_ranks() -> None:
    stages = [(stage.ranks, stage.layers) for stage in CHUNKED.replicas[1].stages]
    assert stages == [
        ((2, 3), (0, 2)),
        ((6, 7), (2, 4)),
        ((2, 3), (4, 6)),
        ((6, 7), (6, 8)),
    ]
    assert CHUNKED.routes[1] == tuple(at(1, stage) for stage in range(4))
    assert len(CHUNKED.devices) == 8
    assert CHUNKED.standby == ()
    assert CHUNKED.replicas[1].ranks == (2, 3, 6, 7)


def test_chunks_have_a_host() -> None:
    assert CHUNKED.hosts == (at(0, 0), at(0, 1), at(1, 0), at(1, 1))
    assert CHUNKED.chunks(at(1, 2)) == CHUNKED.chunks(at(1, 0)) == (at(1, 0), at(1, 2))
    assert CHUNKED.host_of(at(1, 3)) == at(1, 1)
    assert CHUNKED.instances_of(7) == (at(1, 1), at(1, 3))
    assert CHUNKED.instance_of(7) == at(1, 1)


def test_without_chunks_every_instance_is_its_own_host() -> None:
    assert PLAN.hosts == PLAN.instances
    assert PLAN.chunks(at(1, 1)) == (at(1, 1),)
    assert PLAN.instances_of(6) == (at(1, 1),)


def test_a_standby_holds_nothing() -> None:
    plan = replace(
        PLAN, devices=(*PLAN.devices, Device(rank=8, node=1), Device(rank=9, node=1, p=0.0))
    )
    assert plan.validated().standby == (8,)
    assert plan.instance_of(8) is None
    assert plan.instances_of(8) == ()


def test_links_are_neighbours_on_other_ranks() -> None:
    plan = with_stages(PLAN, ((0,), (0, 1)), ((1,), (1, 2)), ((1,), (2, 3)), ((0,), (3, 4)))
    found = [plan.links(0, at(0, stage)) for stage in range(4)]
    assert found == [
        (None, at(0, 1)),
        (at(0, 0), None),
        (None, at(0, 3)),
        (at(0, 2), None),
    ]
