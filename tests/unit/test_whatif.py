"""What-ifs: figures, damage, models, pictures, and the trace of a step."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from resihp_ext.cost.layer_cost import Coefficients, MeasuredLayer
from resihp_ext.cost.link import Link
from resihp_ext.cost.memory import peak_bytes
from resihp_ext.cost.model_shape import MODELS
from resihp_ext.cost.profile_file import Profile
from resihp_ext.errors import UserError
from resihp_ext.plan.dry_run import dry_run
from resihp_ext.plan.schedule import one_forward_one_backward
from resihp_ext.whatif.answer import Answer, answer
from resihp_ext.whatif.damage import damage
from resihp_ext.whatif.layout import layout, ranges, standby
from resihp_ext.whatif.model import model_shape
from resihp_ext.whatif.picture import pictures
from resihp_ext.whatif.report import console, text
from resihp_ext.whatif.scene import scene
from resihp_ext.whatif.settings import Settings
from resihp_ext.whatif.trace import trace_json

pytestmark = pytest.mark.unit


def settings(**flags: str | list[str]) -> Settings:
    return Settings.of(
        {
            name.replace("_", "-"): value if isinstance(value, list) else [value]
            for name, value in flags.items()
        },
        {},
    )


def asked(**flags: str | list[str]) -> Answer:
    return answer(scene(settings(**flags)))


def small(**flags: str | list[str]) -> Answer:
    base: dict[str, str | list[str]] = {
        "model": "llama2-7b",
        "layers": "8",
        "nodes": "2",
        "tp": "2",
        "pp": "4",
        "dp": "2",
        "micro_batches": "16",
    }
    return asked(**{**base, **flags})


@pytest.mark.parametrize(
    ("dead", "slow", "wanted"),
    [
        ([], [], {}),
        (["3,9-11"], [], {3: 0, 9: 0, 10: 0, 11: 0}),
        (["3", "3", "2-4"], [], {2: 0, 3: 0, 4: 0}),
        ([], ["7:0.5"], {7: 0.5}),
        ([], ["1,3-4:0.5,7:0.8", "0:0.9"], {0: 0.9, 1: 0.5, 3: 0.5, 4: 0.5, 7: 0.8}),
        (["2"], ["7:0.5", "7:0.5", "6:1"], {2: 0, 7: 0.5}),
    ],
)
def test_damage(dead: list[str], slow: list[str], wanted: dict[int, float]) -> None:
    found = damage(settings(dead=dead, slow=slow), 12)
    assert found == wanted
    assert list(found) == sorted(found)


@pytest.mark.parametrize(
    ("ranks", "wanted"),
    [((), ""), ((4,), "4"), ((0, 1, 2, 5), "0-2, 5"), ((0, 5, 6, 4), "0, 5-6, 4")],
)
def test_ranges(ranks: tuple[int, ...], wanted: str) -> None:
    assert ranges(ranks) == wanted


def test_sizes_override_a_known_model() -> None:
    base = MODELS["qwen2.5-7b"]
    found = model_shape(settings(model="qwen2.5-7b", layers="12", vocab="1000", seq_length="4096"))
    assert (found.num_layers, found.vocab_size, found.seq_length) == (12, 1152, 4096)
    assert (found.query_groups, found.qkv_bias) == (base.query_groups, True)
    # Where every head has its own keys, it keeps them.
    assert model_shape(settings(model="llama2-7b", heads="16")).query_groups == 16
    assert model_shape(settings(model="qwen2.5-7b", heads="56")).query_groups == 4


def test_a_model_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("layers: 6\nhidden: 512\nffn: 1024\nheads: 8\nvocab: 384\ntied: yes\n")
    found = model_shape(settings(model=str(file), seq_length="2048", query_groups="2"))
    assert found.name == "mine"
    assert (found.num_layers, found.hidden_size, found.query_groups) == (6, 512, 2)
    assert (found.seq_length, found.micro_batch_size, found.tied) == (2048, 1, True)
    same = settings(layers="6", hidden="512", ffn="1024", heads="8", vocab="384")
    assert model_shape(same).parameters > found.parameters
    file.write_text("layers: 6\nhiden: 512\n")
    with pytest.raises(UserError, match=r"mine\.yaml: hiden: unknown"):
        model_shape(settings(model=str(file)))


def test_hardware_that_was_profiled(tmp_path: Path) -> None:
    one = Coefficients(alpha_s=1e-6, beta_s=0.0)
    layer = MeasuredLayer(
        forward=one, backward=one, head_forward_s=0.0, head_backward_s=0.0, embedding_s=0.0
    )
    link = Link(latency_s=0.0, bytes_per_s=1e12)
    profile = Profile(
        device="mine",
        shape=MODELS["tiny"],
        layers={1: layer},
        inside=link,
        between=link,
        step_parameter_s=0.0,
        element_bytes=4,
        fixed_transition_s=0.5,
        notes={},
    )
    file = tmp_path / "mine.json"
    file.write_text(profile.to_json())
    with pytest.raises(UserError, match="--memory-gb: missing"):
        asked(model="tiny", hardware=str(file))
    found = asked(model="tiny", hardware=str(file), memory_gb="2", nodes="1", micro_batches="32")
    # Four layers, forward and backward of a microsecond a token, four micro-batches a replica.
    assert found.before.iteration_s == pytest.approx(4 * 2 * 4 * 1024e-6, rel=1e-3)
    policy = found.scene.healthy.policy
    assert (policy.param_bytes, policy.master_bytes, policy.fused) == (4, 0, False)


def test_degrees_and_nodes_have_sensible_defaults() -> None:
    grid = scene(settings(model="llama2-7b", tp="4", pp="4")).grid
    assert (grid.nodes, grid.dp, grid.devices) == (2, 1, 16)
    grid = scene(settings(model="llama2-7b", tp="4", nodes="3")).grid
    assert (grid.dp, grid.devices) == (6, 24)
    found = scene(settings(model="llama2-7b", tp="4", dp="5", nodes="3", micro_batches="10"))
    assert standby(found.healthy.current, found.healthy.p_of) == (20, 21, 22, 23)


def test_figures_are_those_of_the_dry_run() -> None:
    found = small(slow=["5:0.5"])
    problem = found.scene.healthy
    plan = problem.current
    program = one_forward_one_backward(
        plan, duration=problem.cost.duration(plan, problem.shape, policy=problem.policy)
    )

    def seconds(now: Any) -> float:
        return dry_run(program, now.cost.cost(plan_on(now), now.shape)).makespan

    def plan_on(now: Any) -> Any:
        return type(plan)(**{**vars_of(plan), "devices": now.cluster.devices})

    assert found.before.iteration_s == pytest.approx(seconds(problem))
    assert found.nothing.iteration_s == pytest.approx(seconds(found.scene.faulty))
    assert found.before.memory_bytes == peak_bytes(plan, program, problem.shape, problem.policy)
    assert found.throughput_ratio(found.before) == 1
    assert found.throughput_ratio(found.nothing) < found.throughput_ratio(found.after) <= 1
    assert found.tokens_per_s(found.before) == pytest.approx(
        16 * 8192 / (found.before.iteration_s or 0)
    )


def vars_of(plan: Any) -> dict[str, Any]:
    return {name: getattr(plan, name) for name in plan.__dataclass_fields__}


def test_a_dead_standby_stops_nothing() -> None:
    found = small(nodes="3", dead=["20"], planner="progressive")
    assert found.nothing.dead == ()
    assert found.nothing.iteration_s == found.before.iteration_s
    assert found.stays


def test_planning_time_is_the_clocks() -> None:
    times = iter([10.0, 12.5])
    found = answer(scene(settings(model="tiny", hardware="cpu")), lambda: next(times))
    assert found.planning_s == 2.5


def drawn(found: Answer, width: int) -> tuple[str, int]:
    out = console()
    out.width = width
    with out.capture() as captured:
        tables = list(
            pictures(layout(found.after.plan, found.scene.faulty.p_of, found.before.plan), width)
        )
        for table in tables:
            out.print(table)
    return captured.get(), len(tables)


@pytest.mark.parametrize("width", [40, 60, 100, 200])
def test_a_picture_fits_and_loses_nothing(width: int) -> None:
    found = small(dead=["5"], planner="progressive")
    shown, tables = drawn(found, width)
    assert (tables == 1) == (width >= 100)
    assert max(map(len, shown.splitlines())) <= width
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    cells = [cell for one in found.after.plan.replicas for cell in one.stages]
    assert shown.count("TP ") == shown.count("micro-batches") == len(cells) == 8
    assert sum(f"stage {stage} " in shown for stage in range(4)) == 4


def test_large_layouts_show_what_differs() -> None:
    found = asked(
        model="llama2-7b", nodes="32", tp="2", pp="16", dp="8", layers="64",
        sharded_optimizer="true", dead=["6"], planner="progressive",
    )  # fmt: skip
    shown, _ = drawn(found, 200)
    wanted = sum(stage.depth for stage in found.after.plan.replicas[0].stages)
    assert wanted == 64
    assert "replicas 0-2" in shown
    assert "replica 3 " in shown
    assert "replicas 4-7" in shown
    assert "stages 1-" in shown
    assert shown.count("TP ") < 30


def test_too_little_memory_before_the_fault_is_said() -> None:
    found = asked(model="llama2-13b", tp="4", pp="4", memory_gb="36")
    assert found.before.most_bytes > 36e9 > found.after.most_bytes
    assert ": too much" in text(found, console())


def test_the_trace_is_one_that_viewers_take() -> None:
    found = small(dead=["5"], slow=["12:0.6"])
    plan, problem = found.after.plan, found.scene.faulty
    trace = json.loads(trace_json(problem, plan))
    assert trace["otherData"]["iteration_s"] == pytest.approx(found.after.iteration_s, rel=1e-9)
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "b", "e"}
    check_names(events, {(one.replica, one.stage) for one in plan.hosts}, len(plan.replicas))
    check_no_overlap(events)
    check_pairs(events)
    spans = [event for event in events if event["ph"] == "X"]
    assert all(event["args"].keys() >= {"kind", "ranks", "tp", "layers", "p"} for event in spans)
    kinds = Counter(event["args"]["kind"] for event in events if event["ph"] in "Xb")
    visits = sum(map(len, plan.routes))
    hops = visits - len(plan.routes)
    assert kinds == {
        **dict.fromkeys(("F", "B"), visits),
        **dict.fromkeys(("SF", "RF", "SB", "RB"), hops),
        **dict.fromkeys(("SYNC", "STEP"), len(plan.hosts)),
    }
    last = max(event["ts"] + event["dur"] for event in spans)
    assert last == pytest.approx((found.after.iteration_s or 0) * 1e6, abs=0.01)


def check_names(events: list[dict[str, Any]], hosts: set[tuple[int, int]], replicas: int) -> None:
    about = [event for event in events if event["ph"] == "M"]
    named = {e["pid"]: e["args"]["name"] for e in about if e["name"] == "process_name"}
    assert named == {number: f"replica {number}" for number in range(replicas)}
    assert {(e["pid"], e["tid"]) for e in about if e["name"] == "thread_name"} == hosts
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == hosts


def check_no_overlap(events: list[dict[str, Any]]) -> None:
    free_us: dict[tuple[int, int], float] = {}
    for event in events:
        if event["ph"] == "X":
            where = event["pid"], event["tid"]
            assert event["dur"] >= 0
            assert event["ts"] >= free_us.get(where, 0.0) - 1e-6
            free_us[where] = event["ts"] + event["dur"]


def check_pairs(events: list[dict[str, Any]]) -> None:
    begun = {e["id"]: e for e in events if e["ph"] == "b"}
    ended = {e["id"]: e for e in events if e["ph"] == "e"}
    assert begun
    assert begun.keys() == ended.keys()
    for number, one in begun.items():
        other = ended[number]
        assert all(one[key] == other[key] for key in ("name", "cat", "pid", "tid"))
        assert one["ts"] <= other["ts"]


def test_a_layout_that_is_kept_is_traced_with_its_own_order() -> None:
    found = small(slow=["12:0.97"])
    assert found.decision.name == "stay"
    trace = json.loads(trace_json(found.scene.faulty, found.after.plan))
    assert trace["otherData"]["iteration_s"] == pytest.approx(found.nothing.iteration_s, rel=1e-9)
