"""Files of plans: what they mean, and one line for everything that can be wrong with them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from resihp_ext.errors import UserError
from resihp_ext.plan.plan import Device, Plan, Replica, Stage, uniform_plan
from resihp_ext.plan.timetable import Entry, Frame, plan_at, read_timetable, straight_routes

pytestmark = pytest.mark.unit

FRAME = Frame(
    num_layers=4,
    micro_batches=8,
    devices=tuple(Device(rank=rank, node=rank // 4) for rank in range(8)),
)
THREE = "[[{ranks: [0, 1], layers: 3}, {ranks: [2], layers: 1}], [{ranks: [3], layers: 4}]]"


def read(folder: Path, text: str, frame: Frame = FRAME) -> tuple[Entry, ...]:
    path = folder / "plans.yaml"
    path.write_text(text)
    return read_timetable(path, frame)


def replicas(*layouts: list[tuple[tuple[int, ...], int]]) -> tuple[Replica, ...]:
    built = []
    for stages in layouts:
        edges = [sum(depth for _, depth in stages[:k]) for k in range(len(stages) + 1)]
        built.append(
            Replica(
                stages=tuple(
                    Stage(ranks=ranks, layers=(edges[k], edges[k + 1]))
                    for k, (ranks, _) in enumerate(stages)
                )
            )
        )
    return tuple(built)


def routes_of(plan: Plan) -> list[str]:
    return [" ".join(map(str, route)) for route in plan.routes]


def test_all_forms_of_an_entry(tmp_path: Path) -> None:
    uneven = replace(
        uniform_plan(num_layers=4, tp=1, pp=1, dp=1, micro_batches=8), devices=FRAME.devices
    )
    (tmp_path / "seven.json").write_text(uneven.to_json())
    entries = read(
        tmp_path,
        f"""
        - step: 0
          uniform: {{tp: 2, pp: 2, dp: 2}}
        - step: 10
          replicas: {THREE}
          shares: [3, 5]
        - step: 20
          replicas: {THREE}
          routes: ["0.0 0.1", "1.0", "1.0", "1.0", "1.0", "1.0", "1.0", "1.0"]
        - step: 30
          plan: seven.json
        """,
    )
    assert [entry.step for entry in entries] == [0, 10, 20, 30]
    assert [entry.plan.version for entry in entries] == [0, 1, 2, 3]
    first, by_shares, by_routes, from_file = (entry.plan for entry in entries)
    grid = uniform_plan(num_layers=4, tp=2, pp=2, dp=2, micro_batches=8)
    assert first == replace(grid, devices=FRAME.devices)
    wanted = replicas([((0, 1), 3), ((2,), 1)], [((3,), 4)])
    assert by_shares.replicas == by_routes.replicas == wanted
    assert Counter(routes_of(by_shares)) == {"0.0 0.1": 3, "1.0": 5}
    assert routes_of(by_routes) == ["0.0 0.1", *["1.0"] * 7]
    assert by_shares.standby == (4, 5, 6, 7)
    assert from_file == replace(uneven, version=3)


def test_sizes_that_are_not_given_are_one(tmp_path: Path) -> None:
    (entry,) = read(tmp_path, "- {step: 0, uniform: {pp: 2}}")
    assert [[stage.ranks for stage in one.stages] for one in entry.plan.replicas] == [[(0,), (1,)]]


def test_virtual_stages_share_ranks(tmp_path: Path) -> None:
    (entry,) = read(tmp_path, "- {step: 0, uniform: {tp: 2, pp: 2, virtual: 2}}")
    (one,) = entry.plan.replicas
    assert [stage.ranks for stage in one.stages] == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert [stage.layers for stage in one.stages] == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_plan_in_force(tmp_path: Path) -> None:
    text = "- {step: 0, uniform: {tp: 2}}\n- {step: 3, uniform: {}}\n- {step: 7, uniform: {dp: 2}}"
    entries = read(tmp_path, text)
    found = [plan_at(entries, step).version for step in (0, 2, 3, 6, 7, 100)]
    assert found == [0, 0, 1, 1, 2, 2]


def test_shares_are_dealt_out_evenly() -> None:
    """No replica waits for its micro-batches until the others have all of theirs."""
    two = replicas([((0,), 4)], [((1,), 4)])
    routes = straight_routes(two, [2, 6], 8)
    assert [route[0].replica for route in routes] == [1, 1, 0, 1, 1, 1, 0, 1]
    equal = straight_routes(two, None, 4)
    assert [route[0].replica for route in equal] == [0, 1, 0, 1]
    idle = straight_routes(two, [0, 3], 3)
    assert [route[0].replica for route in idle] == [1, 1, 1]


def entry(**fields: str) -> str:
    """An entry for step 0; ``replicas`` are three ranks unless given."""
    if not fields.keys() & {"uniform", "replicas", "plan"}:
        fields["replicas"] = THREE
    return f"- {{step: 0, {', '.join(f'{name}: {value}' for name, value in fields.items())}}}"


def stages(*texts: str) -> str:
    return entry(replicas=f"[{', '.join(f'[{text}]' for text in texts)}]")


def routes(first: str) -> str:
    return entry(routes=str([first, *["1.0"] * 7]))


WRONG = {
    "": "expected a list of entries",
    "{step: 0}": "expected a list of entries",
    "[": "while parsing a flow node",
    "- 5": "entry 0: expected `step` and a layout, got 5",
    "- {uniform: {}}": "entry 0: needs 'step'",
    "- {step: x, uniform: {}}": "entry 0: step: expected a whole number from 0, got 'x'",
    "- {step: true, uniform: {}}": "step: expected a whole number from 0, got True",
    "- {step: -1, uniform: {}}": "step: expected a whole number from 0, got -1",
    "- {step: 2, uniform: {}}": "the first entry must be for step 0, not 2",
    "- {step: 0, uniform: {}}\n- {step: 0, uniform: {}}": "steps must ascend: [0, 0]",
    "- {step: 0, uniform: {}}\n- {step: 5, uniform: {pp: 3}}": "entry 1: uniform plan: 4 layers",
    "- {step: 0}": "needs one of uniform, replicas, plan; has []",
    entry(uniform="{}", plan="x"): "needs one of uniform, replicas, plan; has ['plan', 'uniform']",
    entry(uniform="{}", steps="3"): "unknown keys ['steps']",
    entry(uniform=""): "uniform: expected names with values, got None",
    entry(uniform="[2, 2, 2]"): "uniform: expected names with values, got [2, 2, 2]",
    entry(uniform="{tpp: 2}"): "uniform: unknown keys ['tpp']",
    entry(uniform="{tp: two}"): "uniform: tp: expected a whole number from 1, got 'two'",
    entry(uniform="{pp: 0}"): "uniform: pp: expected a whole number from 1, got 0",
    entry(uniform="{virtual: 0}"): "uniform: virtual: expected a whole number from 1, got 0",
    entry(uniform="{dp: 3}"): "8 micro-batches over 3 replicas: both must divide evenly",
    entry(uniform="{pp: 2, virtual: 3}"): "4 layers over 6 stages",
    entry(uniform="{tp: 16}"): "rank 8 is not a live device",
    entry(uniform="{dp: 2}", shares="[3, 5]"): "shares: only one, and only with replicas",
    entry(uniform="{dp: 2}", routes="['0.0']"): "routes: only one, and only with replicas",
    entry(shares="[3, 5]", routes="['0.0']"): "routes and shares: only one",
    entry(shares="[3, 4]"): "shares [3, 4]: expected 2 numbers with sum 8",
    entry(shares="[8]"): "shares [8]: expected 2 numbers with sum 8",
    entry(shares="[9, -1]"): "shares: expected a whole number from 0, got -1",
    entry(shares="[2.5, 5.5]"): "shares: expected a whole number from 0, got 2.5",
    entry(shares="8"): "shares: expected a list, got 8",
    entry(routes="['0.0 0.1']"): "the plan has 1 micro-batches, the job 8",
    entry(routes="5"): "routes: expected a list, got 5",
    entry(routes="[0.0]"): 'routes: expected texts such as "0.0 1.1", got 0.0',
    entry(routes="['0 1']"): "routes: expected texts such as \"0.0 1.1\", got '0 1'",
    routes("7.0"): "micro-batch 0 visits Instance(replica=7, stage=0), which does not",
    routes("0.1"): "micro-batch 0 arrives at layer 0 but Instance(replica=0, stage=1)",
    routes("0.0"): "micro-batch 0 ends after layer 3 of 4",
    entry(replicas="5"): "replicas: expected a list, got 5",
    entry(replicas="[]"): "replicas: expected a list, got []",
    entry(replicas="[{ranks: [0], layers: 4}]"): "replica: expected a list, got {'ranks'",
    entry(replicas="[[0, 1]]"): "stage: expected names with values, got 0",
    stages("{ranks: [0]}"): "stage: expected ranks and layers, got {'ranks': [0]}",
    stages("{ranks: [0], layers: 4, tp: 2}"): "stage: expected ranks and layers",
    stages("{ranks: 0, layers: 4}"): "ranks: expected a list, got 0",
    stages("{ranks: [], layers: 4}"): "ranks: expected a list, got []",
    stages("{ranks: ['0'], layers: 4}"): "ranks: expected a whole number from 0, got '0'",
    stages("{ranks: [0], layers: 4.5}"): "layers: expected a whole number from 1, got 4.5",
    stages("{ranks: [0], layers: 4}, {ranks: [1], layers: 0}"): "from 1, got 0",
    stages("{ranks: [0], layers: 3}"): "replica 0: layers [(0, 3)] do not cover 0..4",
    stages("{ranks: [0], layers: 5}"): "replica 0: layers [(0, 5)] do not cover 0..4",
    stages("{ranks: [9], layers: 4}"): "replica 0 stage 0: rank 9 is not a live device",
    stages("{ranks: [2, 2], layers: 4}"): "replica 0 stage 0 names a rank twice: (2, 2)",
    stages("{ranks: [0], layers: 4}", "{ranks: [0], layers: 4}"): "rank 0 is in replica 0 stage 0",
    stages(*(f"{{ranks: [{k}], layers: 4}}" for k in range(3))): "over 3 replicas: give `shares`",
    entry(plan="nowhere.json"): "No such file or directory",
    entry(plan="plans.yaml"): "not the JSON form of a plan",
    entry(plan="."): "Is a directory",
}


@pytest.mark.parametrize("text", WRONG)
def test_wrong_files(tmp_path: Path, text: str) -> None:
    with pytest.raises(UserError) as error:
        read(tmp_path, text)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/plans.yaml: "), "the file is named"
    assert WRONG[text] in message
    assert "\n" not in message, "one line"


def test_plan_files_must_fit_the_job(tmp_path: Path) -> None:
    plan = uniform_plan(num_layers=4, tp=2, pp=2, dp=2, micro_batches=8)
    (tmp_path / "plan.json").write_text(plan.to_json())
    for frame, words in (
        (replace(FRAME, num_layers=8), "the plan has 4 layers, the job 8"),
        (replace(FRAME, micro_batches=16), "the plan has 8 micro-batches, the job 16"),
        (replace(FRAME, devices=FRAME.devices[:6]), "the plan has 8 devices, the job 6"),
    ):
        with pytest.raises(UserError, match=words):
            read(tmp_path, entry(plan="plan.json"), frame)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.yaml: .*No such file"):
        read_timetable(tmp_path / "none.yaml", FRAME)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(UserError, match=r"binary\.yaml: .*can't decode"):
        read_timetable(tmp_path / "binary.yaml", FRAME)
