"""A rank's seat: what its Megatron is told depends on its own layers alone."""

import pytest
from plans import random_plan

from megatron.resilience.executor.place import Seat
from resihp_ext.plan.plan import Device, Plan, PlanError, Replica, Stage, uniform_plan
from resihp_ext.plan.timetable import straight_routes

pytestmark = pytest.mark.unit


def plan_of(*stages: tuple[tuple[int, ...], int], devices: int = 8) -> Plan:
    """One replica of ``(ranks, layers)``."""
    built, at = [], 0
    for ranks, depth in stages:
        built.append(Stage(ranks=ranks, layers=(at, at + depth)))
        at += depth
    replicas = (Replica(stages=tuple(built)),)
    return Plan(
        version=0,
        num_layers=at,
        devices=tuple(Device(rank=rank, node=0) for rank in range(devices)),
        replicas=replicas,
        routes=straight_routes(replicas, None, 4),
    ).validated()


@pytest.mark.parametrize(
    ("rank", "layout", "stage"),
    [(0, "Ett|ttttt|L", 0), (1, "Ett|ttt|ttL", 1), (2, "Ettttt||ttL", 2), (7, "Ettttttt||L", 1)],
)
def test_layout_of_one_stage(rank: int, layout: str, stage: int) -> None:
    seat = Seat.of(plan_of(((0,), 2), ((1,), 3), ((2,), 2)), rank)
    assert (seat.layout_text(), seat.stage, seat.pipeline) == (layout, stage, 3)


def test_a_single_stage_needs_no_layout() -> None:
    seat = Seat.of(plan_of(((0, 1), 4)), 1)
    assert (seat.layout_text(), seat.pipeline, seat.tp, seat.tp_rank) == (None, 1, 2, 1)
    assert seat.flags(["--sequence-parallel"]) == [
        "--sequence-parallel",
        *("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "1"),
    ]


def test_sequence_parallelism_goes_where_there_is_one_rank() -> None:
    seat = Seat.of(plan_of(((0,), 4)), 0)
    assert "--sequence-parallel" not in seat.flags(["--sequence-parallel"])


def layers_built(seat: Seat) -> list[tuple[int, int]]:
    """The layers that upstream makes of the layout: row by row, this rank's cell of each."""
    text = seat.layout_text()
    if text is None:
        return [(0, seat.num_layers)]
    found, at = [], 0
    for number, cell in enumerate(text.split("|")):
        depth = cell.count("t")
        if number % seat.pipeline == seat.stage:
            found.append((at, at + depth))
        at += depth
    assert at == seat.num_layers
    assert text.startswith("E")
    assert text.endswith("L")
    return found


@pytest.mark.parametrize("seed", range(60))
def test_upstream_builds_the_plan_s_layers(seed: int) -> None:
    plan = random_plan(seed)
    for device in plan.devices:
        seat = Seat.of(plan, device.rank)
        wanted = list(seat.layers) or [(plan.num_layers, plan.num_layers)]
        assert layers_built(seat) == wanted


@pytest.mark.parametrize("virtual", [1, 2, 3])
def test_virtual_stages(virtual: int) -> None:
    plan = uniform_plan(num_layers=12, tp=1, pp=2, dp=1, micro_batches=4, virtual=virtual)
    for rank in (0, 1):
        seat = Seat.of(plan, rank)
        assert layers_built(seat) == list(seat.layers)
        assert seat.virtual == (virtual if virtual > 1 else None)


def test_first_and_last_of_several_chunks_are_not_one_rank_s() -> None:
    plan = plan_of(((0,), 1), ((1,), 2), ((0,), 1))
    with pytest.raises(PlanError, match="rank 0 holds the first and the last"):
        Seat.of(plan, 0)


def test_seats_with_the_same_layers_share_modules() -> None:
    before = plan_of(((0,), 2), ((1,), 3), ((2,), 2))
    after = plan_of(((0,), 2), ((3,), 3), ((2,), 2))
    assert Seat.of(after, 0).same_modules(Seat.of(before, 0))
    assert not Seat.of(after, 3).same_modules(Seat.of(before, 3))
