"""Validation of suspects: who is measured, and what the measured seconds say."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp_ext.detector.probe import MOST_RANKS, Task, TaskKind
from resihp_ext.detector.references import REFERENCES, tasks_for
from resihp_ext.detector.suspect import Suspect, SuspectKind, Verdict
from resihp_ext.detector.validate import Finding, JudgeConfig, judge
from resihp_ext.errors import UserError
from resihp_ext.plan.plan import Plan, uniform_plan

pytestmark = pytest.mark.unit

HEALTHY_S, TIMES = 2e-3, 8


def plan(ranks: int = 8, per_node: int = 2) -> Plan:
    return uniform_plan(
        num_layers=8,
        tp=1,
        pp=2,
        dp=ranks // 2,
        micro_batches=ranks,
        virtual=1,
        devices_per_node=per_node,
    )


def suspect(kind: SuspectKind, *ranks: int, p: float = 0.5) -> Suspect:
    return Suspect(kind=kind, ranks=ranks, p=p, since_step=9, evidence="it looks slow")


def asked(one: Suspect, layout: Plan | None = None) -> tuple[Task, ...]:
    layout = layout or plan()
    healthy = {device.rank for device in layout.devices} - set(one.ranks)
    return tasks_for(one, layout, healthy)


def measured(
    tasks: Sequence[Task], speed: Mapping[int, float], *, noise: float = 0.02, seed: int = 0
) -> dict[tuple[int, int], list[float]]:
    """Seconds as devices of these speeds would give them; 1.0 where none is said.

    A task of several is as slow as the slowest.
    """
    drawn, found = random.Random(seed), {}
    for at, task in enumerate(tasks):
        for rank in task.ranks:
            own = [speed.get(one, 1.0) for one in task.ranks]
            left = speed.get(rank, 1.0) if task.kind is TaskKind.GEMM else min(own)
            mean_s = HEALTHY_S / left
            found[at, rank] = [mean_s * drawn.lognormvariate(0, noise) for _ in range(TIMES)]
    return found


def finding(one: Suspect, speed: Mapping[int, float], **more: float) -> Finding:
    tasks = asked(one)
    return judge(one, tasks, measured(tasks, speed, **more))  # type: ignore[arg-type]


# -- who is measured -----------------------------------------------------------


def test_a_device_is_compared_with_one_beside_it_and_one_elsewhere() -> None:
    (task,) = asked(suspect("device", 3))
    assert (task.kind, len(task.ranks)) == (TaskKind.GEMM, 1 + REFERENCES)
    assert {3, 2} < set(task.ranks), "2 is on its node"
    assert len({rank // 2 for rank in task.ranks}) == 2


def test_a_link_between_nodes_is_compared_with_links_of_other_nodes() -> None:
    first, *others = asked(suspect("link", 1, 2))
    assert (first.kind, first.ranks) == (TaskKind.P2P, (1, 2))
    assert others
    for task in others:
        one, other = task.ranks
        assert one // 2 != other // 2, "it crosses nodes, too"
        assert {one // 2, other // 2} != {0, 1}


def test_a_link_inside_a_node_is_compared_with_such() -> None:
    _, *others = asked(suspect("link", 2, 3))
    assert others
    assert all(task.ranks[0] // 2 == task.ranks[1] // 2 for task in others)


def test_a_host_is_compared_with_devices_and_rings_of_others() -> None:
    products, *rings = asked(suspect("host", 0, 1))
    assert set(products.ranks) >= {0, 1}
    assert len(products.ranks) == 2 + REFERENCES
    assert [task.kind for task in rings] == [TaskKind.ALL_REDUCE] * (1 + REFERENCES)
    assert rings[0].ranks == (0, 1)


@pytest.mark.parametrize(
    "one", [suspect("device", 1), suspect("host", 0, 1), suspect("link", 0, 1)]
)
def test_with_nobody_to_compare_nothing_is_measured(one: Suspect) -> None:
    assert tasks_for(one, plan(), ()) == ()
    assert judge(one, (), {}).verdict is Verdict.UNKNOWN


def test_a_dead_suspect_is_not_asked() -> None:
    layout = plan()
    dead = replace(layout.devices[3], p=0.0)
    layout = replace(layout, devices=(*layout.devices[:3], dead, *layout.devices[4:]))
    assert asked(suspect("device", 3), layout) == ()


@given(st.data())
def test_only_the_suspect_and_few_healthy_ranks_take_part(data: st.DataObject) -> None:
    layout = plan(8, data.draw(st.sampled_from([1, 2, 4, 8])))
    kind = data.draw(st.sampled_from(["device", "link"]))
    ranks = data.draw(st.permutations(range(8)))[: 1 if kind == "device" else 2]
    healthy = data.draw(st.sets(st.integers(0, 7)))
    tasks = tasks_for(suspect(kind, *ranks), layout, healthy)
    taking = {rank for task in tasks for rank in task.ranks}
    assert taking - set(ranks) <= healthy - set(ranks)
    assert len(tasks) <= 1 + REFERENCES
    assert not tasks or set(ranks) <= taking
    assert tasks == tasks_for(suspect(kind, *ranks), layout, sorted(healthy)), "the same every time"


def test_where_few_nodes_are_a_host_or_link_has_nobody_to_be_compared_with() -> None:
    assert asked(suspect("host", *range(8)), plan(per_node=8)) == ()
    assert asked(suspect("link", 3, 4), plan(per_node=4)) == (), "no other node"
    inside = [task.ranks for task in asked(suspect("link", 3, 4), plan(per_node=8))]
    assert inside == [(3, 4), (0, 1), (2, 5)], "other links of the same node"


@pytest.mark.parametrize("per_node", [MOST_RANKS - REFERENCES, MOST_RANKS])
def test_a_large_host_is_measured_as_far_as_a_task_reaches(per_node: int) -> None:
    layout = plan(4 * per_node, per_node)
    products, own, *others = asked(suspect("host", *range(per_node)), layout)
    assert len(products.ranks) == MOST_RANKS
    assert {len(ring.ranks) for ring in (own, *others)} == {MOST_RANKS - REFERENCES}


# -- what is found -------------------------------------------------------------


@pytest.mark.parametrize("p", [0.25, 0.5, 0.7])
def test_a_slow_device_is_slow_by_how_much_it_is(p: float) -> None:
    found = finding(suspect("device", 3), {3: p})
    assert (found.verdict, found.slow) == (Verdict.SLOW, {3})
    assert found.p[3] == pytest.approx(p, rel=0.05)
    assert found.least_p == found.p[3]
    assert "3: " in found.evidence


def test_a_healthy_device_is_healthy_and_not_above_full_speed() -> None:
    found = finding(suspect("device", 3), {3: 1.02})
    assert (found.verdict, found.slow) == (Verdict.HEALTHY, frozenset())
    assert found.p[3] == pytest.approx(1.0, abs=0.05)
    assert found.p[3] <= 1.0


def test_close_to_the_limit_nothing_is_decided() -> None:
    found = finding(suspect("device", 3), {3: JudgeConfig().device_below_ratio}, noise=0.05)
    assert found.verdict is Verdict.UNKNOWN
    assert (dict(found.p), found.least_p) == ({}, None)


def test_references_that_do_not_agree_are_none() -> None:
    one = suspect("device", 3)
    (task,) = tasks = asked(one)
    reference = next(rank for rank in task.ranks if rank != 3)
    assert judge(one, tasks, measured(tasks, {3: 0.6, reference: 0.5})).verdict is Verdict.UNKNOWN


def test_what_is_missing_or_no_time_has_no_say() -> None:
    one = suspect("device", 3)
    (task,) = tasks = asked(one)
    seconds = measured(tasks, {3: 0.5})
    lost = next(rank for rank in task.ranks if rank != 3)
    seconds[0, lost] = [float("nan"), float("inf"), -1.0, 0.0]
    assert judge(one, tasks, seconds).verdict is Verdict.SLOW, "one reference is left"
    del seconds[0, 3]
    assert judge(one, tasks, seconds).verdict is Verdict.UNKNOWN
    assert judge(one, tasks, {}).evidence == "nothing measured"


def test_a_slow_link_is_the_pairs() -> None:
    found = finding(suspect("link", 2, 1), {1: 0.4})
    assert found.verdict is Verdict.SLOW
    assert found.links == {(1, 2): pytest.approx(0.4, rel=0.05)}
    assert not found.p


def test_a_healthy_link_is_healthy() -> None:
    assert finding(suspect("link", 1, 2), {}).verdict is Verdict.HEALTHY


def test_a_host_of_slow_devices_and_one_whose_devices_are_slow_together_only() -> None:
    one = suspect("host", 0, 1, p=0.6)
    found = finding(one, {0: 0.5, 1: 0.5})
    assert (found.verdict, found.slow) == (Verdict.SLOW, {0, 1})
    assert found.p == {0: pytest.approx(0.5, rel=0.05), 1: pytest.approx(0.5, rel=0.05)}
    tasks = asked(one)
    seconds = measured(tasks, {})
    ring = next(at for at, task in enumerate(tasks) if task.kind is TaskKind.ALL_REDUCE)
    for rank in (0, 1):
        seconds[ring, rank] = [3 * value for value in seconds[ring, rank]]
    together = judge(one, tasks, seconds)
    assert together.verdict is Verdict.SLOW
    assert together.p == {0: 0.6, 1: 0.6}, "the suspicion's own figure"
    assert "all-reduce at 0.3" in together.evidence


@given(p=st.floats(0.1, 1.0), noise=st.floats(0.0, 0.08), seed=st.integers(0, 999))
def test_a_verdict_is_right_or_there_is_none(p: float, noise: float, seed: int) -> None:
    one = suspect("device", 3)
    tasks = asked(one)
    found = judge(one, tasks, measured(tasks, {3: p}, noise=noise, seed=seed))
    limit = JudgeConfig().device_below_ratio
    if p > limit * 1.1:
        assert found.verdict is not Verdict.SLOW
    if p < limit / 1.1:
        assert found.verdict is not Verdict.HEALTHY
    if noise < 0.01 and not limit / 1.1 < p < limit * 1.1:
        assert found.verdict is not Verdict.UNKNOWN


@pytest.mark.parametrize("ratio", [0.5, JudgeConfig().device_below_ratio, 1.0])
@pytest.mark.parametrize("kind", ["device", "link"])
def test_without_noise_the_limit_alone_decides(kind: SuspectKind, ratio: float) -> None:
    one = suspect(kind, *((3,) if kind == "device" else (2, 3)))
    # The other limit must have no say.
    config = JudgeConfig(device_below_ratio=ratio, link_below_ratio=0.1)
    if kind == "link":
        config = JudgeConfig(device_below_ratio=0.1, link_below_ratio=ratio)
    tasks = asked(one)
    for p, verdict in ((ratio * (1 + 1e-9), Verdict.HEALTHY), (ratio * (1 - 1e-9), Verdict.SLOW)):
        assert judge(one, tasks, measured(tasks, {3: p}, noise=0), config).verdict is verdict


def test_a_tie_is_no_difference_and_the_limit_itself_is_healthy() -> None:
    one = suspect("device", 3)
    tasks = asked(one)
    tie = judge(one, tasks, measured(tasks, {}, noise=0), JudgeConfig(device_below_ratio=1.0))
    assert (tie.verdict, tie.p) == (Verdict.HEALTHY, {3: 1.0})
    at = judge(one, tasks, measured(tasks, {3: 0.5}, noise=0), JudgeConfig(device_below_ratio=0.5))
    assert (at.verdict, at.p) == (Verdict.HEALTHY, {3: 0.5})


def test_as_many_standard_errors_as_asked_for_must_lie_between() -> None:
    one = suspect("device", 3)
    tasks = asked(one)
    seconds = measured(tasks, {}, noise=0)
    seconds[0, 3] = [2 * HEALTHY_S * part for part in (0.98, 1.0, 1.02)]
    error = 1.2533 * 1.4826 * 0.02 / 3**0.5
    enough = (JudgeConfig().device_below_ratio - 0.5) / (0.5 * error)
    found = [
        judge(one, tasks, seconds, JudgeConfig(sigmas=sigmas)).verdict
        for sigmas in (0.0, enough * 0.999, enough * 1.001)
    ]
    assert found == [Verdict.SLOW, Verdict.SLOW, Verdict.UNKNOWN]


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_repetitions_than_the_least_are_none(rank: int) -> None:
    one = suspect("device", 3)
    tasks = tasks_for(one, plan(), [2])
    seconds = measured(tasks, {3: 0.5}, noise=0)
    least = JudgeConfig().least_samples
    seconds[0, rank] = seconds[0, rank][:least]
    assert judge(one, tasks, seconds).verdict is Verdict.SLOW
    seconds[0, rank] = [*seconds[0, rank][1:], float("nan")]
    assert judge(one, tasks, seconds).verdict is Verdict.UNKNOWN


def test_how_far_a_slow_reference_is_forgiven() -> None:
    one, q = suspect("device", 3), 0.9
    tasks = asked(one)
    reference = next(rank for rank in tasks[0].ranks if rank != 3)
    limit = JudgeConfig().device_below_ratio
    slow, healthy = limit / (2 / q - 1), limit / (2 - 1 / q)  # three times half their distance
    speeds = (slow * 0.999, slow * 1.001, healthy * 0.999, healthy * 1.001)
    found = [
        judge(one, tasks, measured(tasks, {3: p, reference: q}, noise=0)).verdict for p in speeds
    ]
    assert found == [Verdict.SLOW, Verdict.UNKNOWN, Verdict.UNKNOWN, Verdict.HEALTHY]


@given(p=st.floats(0.1, 1.0), q=st.floats(0.1, 1.0), which=st.integers(0, 1))
def test_one_slow_reference_never_turns_a_verdict(p: float, q: float, which: int) -> None:
    one = suspect("device", 3)
    tasks = asked(one)
    reference = [rank for rank in tasks[0].ranks if rank != 3][which]
    found = judge(one, tasks, measured(tasks, {3: p, reference: q}, noise=0)).verdict
    limit = JudgeConfig().device_below_ratio
    wrong = Verdict.SLOW if p > limit * (1 + 1e-9) else Verdict.HEALTHY
    assert found is not wrong or abs(p - limit) < 1e-8


def test_where_all_are_slow_alike_nobody_is_slower_than_others() -> None:
    found = finding(suspect("device", 3), dict.fromkeys(range(8), 0.4))
    assert found.verdict is Verdict.HEALTHY, "only others say how fast a device should be"
    assert found.p[3] == pytest.approx(1.0, abs=0.05)


def test_of_a_host_only_the_slow_devices_are_slow() -> None:
    one = suspect("host", 0, 1)
    tasks = asked(one)
    seconds = measured(tasks, {1: 0.5})
    found = judge(one, tasks, seconds)
    assert (found.verdict, set(found.slow), set(found.p)) == (Verdict.SLOW, {1}, {0, 1})
    del seconds[0, 0]
    assert set(judge(one, tasks, seconds).p) == {1}, "nothing is known of rank 0"
    alone = {key: value for key, value in measured(tasks, {}).items() if key != (0, 0)}
    assert judge(one, tasks, alone).verdict is Verdict.UNKNOWN


@given(st.data(), st.sampled_from([suspect("device", 3), suspect("host", 0, 1)]))
def test_a_finding_depends_on_what_was_measured_and_on_no_order(
    data: st.DataObject, one: Suspect
) -> None:
    tasks = asked(one)
    speed = data.draw(st.dictionaries(st.integers(0, 7), st.floats(0.2, 1.0)))
    seconds = measured(tasks, speed, seed=data.draw(st.integers(0, 99)))
    shuffled = {
        key: data.draw(st.permutations(seconds[key]))
        for key in data.draw(st.permutations(list(seconds)))
    }
    found = judge(one, tasks, seconds)
    assert found == judge(one, tasks, seconds) == judge(one, tasks, shuffled)
    other = judge(one, tasks, {key: [4 * value for value in seconds[key]] for key in seconds})
    assert replace(other, evidence="") == replace(found, evidence=""), "no speed is the right one"


@given(st.data())
def test_whatever_comes_back_a_throughput_is_one(data: st.DataObject) -> None:
    one = data.draw(st.sampled_from([suspect("device", 3), suspect("link", 1, 2)]))
    tasks = asked(one)
    keys = st.tuples(st.integers(0, len(tasks)), st.integers(0, 7))
    found = judge(one, tasks, data.draw(st.dictionaries(keys, st.lists(st.floats(), max_size=5))))
    assert all(0 < p <= 1 for p in (*found.p.values(), *found.links.values()))
    assert (found.least_p is None) == (found.verdict is Verdict.UNKNOWN)


def test_times_that_no_ratio_holds_decide_nothing() -> None:
    one = suspect("device", 3)
    tasks = asked(one)
    seconds = {(0, rank): [1e300 if rank == 3 else 1e-300] * 3 for rank in tasks[0].ranks}
    assert judge(one, tasks, seconds).verdict is Verdict.UNKNOWN, "a speed of 0 would be death"


@pytest.mark.parametrize(
    "fields",
    [
        {"device_below_ratio": 0.0},
        {"link_below_ratio": 1.1},
        {"link_below_ratio": float("nan")},
        {"sigmas": -1.0},
        {"sigmas": float("nan")},
        {"sigmas": float("inf")},
        {"least_samples": 0},
    ],
)
def test_settings_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(UserError, match="validation: "):
        JudgeConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        (TaskKind.P2P, (1,)),
        (TaskKind.P2P, (1, 2, 3)),
        (TaskKind.ALL_REDUCE, (1,)),
        ("gemm", (1, 1)),
    ],
)
def test_tasks_that_nobody_can_do_are_refused(kind: TaskKind, ranks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not acceptable"):
        Task(kind, ranks)
