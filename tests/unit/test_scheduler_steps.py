"""The pieces that planners are made of: layer maps, shares, bounds, migration, moved state."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
from plans import random_plan
from problems import layout, problem_of

from resihp_ext.cost.memory import MemoryPolicy
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.plan.plan import Plan
from resihp_ext.scheduler.clock import NO_HOP, StageTimes, chain_s
from resihp_ext.scheduler.layers import balanced, compositions, repartitioned
from resihp_ext.scheduler.maps import bounds_of
from resihp_ext.scheduler.migrate import migrated
from resihp_ext.scheduler.movement import arranged, lacking_bytes
from resihp_ext.scheduler.routes import dealt, least_s
from resihp_ext.scheduler.shares import Share, balanced_shares, dealt_counts
from resihp_ext.state.slab import Slab
from resihp_ext.state.transfer import plan_transfers

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("depths", "speeds", "expected"),
    [
        ((4, 4, 4), (1.0, 0.5, 1.0), (5, 2, 5)),
        ((4, 4, 4), (1.0, 1.0, 1.0), (4, 4, 4)),
        ((4, 4), (0.25, 1.0), (1, 7)),
        ((2, 2, 2, 2), (1.0, 0.1, 1.0, 1.0), (3, 1, 2, 2)),
        # 10 * 0.7 is a little less than 7 in binary.
        ((10, 10), (0.7, 1.0), (8, 12)),
    ],
)
def test_repartition(
    depths: tuple[int, ...], speeds: tuple[float, ...], expected: tuple[int, ...]
) -> None:
    assert repartitioned(depths, speeds, [99] * len(depths)) == expected


def test_repartition_stays_within_memory() -> None:
    assert repartitioned((4, 4, 4), (1.0, 0.5, 1.0), [4, 9, 9]) == (4, 2, 6)
    assert repartitioned((4, 4, 4), (1.0, 0.5, 1.0), [4, 3, 4]) is None
    assert repartitioned((4, 4, 4), (1.0, 0.5, 1.0), [12, 0, 12]) is None


@pytest.mark.parametrize("seed", range(40))
def test_balanced_maps_are_the_best(seed: int) -> None:
    random = Random(seed)
    count = random.randint(1, 4)
    limits = [random.randint(1, 8) for _ in range(count)]
    layers = random.randint(count, 10)
    each = [random.choice([1.0, 2.0, 0.7]) for _ in range(count)]
    ends = [random.choice([0.0, 1.5]) for _ in range(count)]

    def load(stage: int, depth: int) -> float:
        return ends[stage] + each[stage] * depth

    def slowest(depths: tuple[int, ...]) -> float:
        return max(load(stage, depth) for stage, depth in enumerate(depths))

    every = list(compositions(layers, limits))
    expected = [d for d in product(range(1, layers + 1), repeat=count) if sum(d) == layers]
    assert every == [d for d in expected if all(n <= m for n, m in zip(d, limits, strict=True))]
    found = balanced(layers, load, limits)
    assert (found is None) == (not every)
    if found is not None:
        assert found in every
        assert slowest(found) == min(map(slowest, every))


@pytest.mark.parametrize("seed", range(60))
def test_bounds_lie_a_little_below_the_time(seed: int) -> None:
    random = Random(seed)
    pairs = [(random.uniform(0.5, 3), random.uniform(0.5, 6)) for _ in range(random.randint(1, 6))]
    micro_batches = random.randint(1, 20)
    stages = [StageTimes(pair, pair) for pair in pairs]
    seconds = chain_s(stages, [NO_HOP] * (len(pairs) - 1), micro_batches)
    bound_s = max(one.at_least_s(micro_batches) for one in bounds_of(pairs))
    assert seconds / 1.35 < bound_s <= seconds * (1 + 1e-12)


def test_bounds_are_the_time_of_equal_stages() -> None:
    for count, micro_batches in ((1, 1), (4, 1), (4, 3), (4, 4), (4, 9)):
        stages = [StageTimes((1.0, 2.0), (1.0, 2.0))] * count
        seconds = chain_s(stages, [NO_HOP] * (count - 1), micro_batches)
        found = max(one.at_least_s(micro_batches) for one in bounds_of([(1.0, 2.0)] * count))
        if micro_batches > count:
            assert found == pytest.approx(seconds)
        assert found <= seconds


def shares_of(random: Random) -> list[Share]:
    """Classes of replicas with their own speeds; estimates are off on purpose."""
    found = []
    for _ in range(random.randint(1, 3)):
        fill, each, off = random.uniform(0, 5), random.uniform(0.5, 3), random.uniform(0.8, 1.2)

        def seconds(m: int, fill: float = fill, each: float = each) -> float:
            return fill + m * each

        def about(m: int, fill: float = fill, each: float = each, off: float = off) -> float:
            return off * (fill + m * each)

        found.append(Share(random.randint(1, 3), seconds, about, each))
    return found


@pytest.mark.parametrize("seed", range(80))
def test_shares_are_the_best(seed: int) -> None:
    random = Random(seed)
    shares, total = shares_of(random), random.randint(1, 9)
    most, found_s = balanced_shares(shares, total)
    options = product(range(total + 1), repeat=len(shares))
    able = [o for o in options if sum(n * s.count for n, s in zip(o, shares, strict=True)) >= total]
    best_s = min(
        max(s.seconds(n) for n, s in zip(o, shares, strict=True) if n) for o in able if any(o)
    )
    assert found_s == pytest.approx(best_s)
    counts = dealt_counts(shares, most, total)
    assert sum(map(sum, counts)) == total
    for mine, limit, one in zip(counts, most, shares, strict=True):
        assert len(mine) == one.count
        assert all(0 <= n <= limit for n in mine)


def uneven(*seconds: tuple[float, ...]) -> list[list[StageTimes]]:
    return [[StageTimes((s, 2 * s), (s, 2 * s)) for s in replica] for replica in seconds]


def test_micro_batches_leave_a_slow_stage() -> None:
    stages = uneven((1, 1, 1), (1, 3, 1))
    ways = migrated(stages, [m % 2 for m in range(16)], 1)
    moved = [way for way in ways if len(set(way)) > 1]
    assert moved
    assert all(way == (1, 0, 1) for way in moved), "only at the slow stage, only from its replica"
    assert 8 + len(moved) < 3 * (8 - len(moved)) + 6


def test_nothing_moves_without_a_gap() -> None:
    homes = [m % 2 for m in range(8)]
    straight = [(home,) * 2 for home in homes]
    assert migrated(uneven((1, 1), (1, 1)), homes, 1) == straight
    assert migrated(uneven((1, 2), (1, 3)), homes, 8) == straight
    # As slow as the stage that holds its replica back anyway.
    assert migrated(uneven((1, 3), (2, 3)), homes, 1) == straight
    assert migrated(uneven((1, 2)), [0, 0], 1) == [(0, 0), (0, 0)]


@pytest.mark.parametrize("spread", [False, True])
def test_dealt_ways_have_the_counts(spread: bool) -> None:
    random = Random(7)
    for _ in range(200):
        replicas, total = random.randint(1, 4), random.randint(1, 9)
        counts = tuple(
            tuple(sum(one == r for one in draw) for r in range(replicas))
            for draw in ([random.randrange(replicas) for _ in range(total)] for _ in range(3))
        )
        ways = dealt(counts, spread=spread)
        for stage, wanted in enumerate(counts):
            found = [way[stage] for way in ways]
            assert tuple(found.count(r) for r in range(replicas)) == wanted
        changes = sum(a != b for way in ways for a, b in pairwise(way))
        leave = [
            sum(max(0, old - new) for old, new in zip(a, b, strict=True))
            for a, b in pairwise(counts)
        ]
        assert changes == sum(leave), "as few as the counts allow"


def test_least_split() -> None:
    assert least_s([1.0, 2.0], 6) == (4.0, (4, 2))
    assert least_s([1.0, 1.0, 10.0], 5) == (3.0, (3, 2, 0))


SMALL = ModelShape(
    name="small",
    num_layers=6,
    hidden_size=48,
    ffn_hidden_size=96,
    attention_heads=6,
    query_groups=6,
    vocab_size=384,
    seq_length=128,
    qkv_bias=True,
)


def held_slabs(plan: Plan, tied: bool) -> dict[int, list[Slab]]:
    """Logical tensors of the small model, cut as its ranks hold them."""
    cut = SMALL.layer_matrix_parameters + SMALL.qkv_size
    found: dict[int, list[Slab]] = {}
    for one in plan.replicas:
        for stage in one.stages:
            sizes = {f"matrices.{n}": (cut, True) for n in range(*stage.layers)}
            sizes |= {f"norms.{n}": (2 * SMALL.hidden_size, False) for n in range(*stage.layers)}
            if stage.layers[0] == 0:
                sizes["embedding"] = (SMALL.embedding_parameters, True)
            if stage.layers[1] == plan.num_layers:
                sizes["embedding" if tied else "head"] = (SMALL.embedding_parameters, True)
                sizes["norm"] = (SMALL.hidden_size, False)
            for place, rank in enumerate(stage.ranks):
                found[rank] = []
                for name, (size, is_cut) in sizes.items():
                    slab = Slab.whole(name, (size,))
                    part = size // stage.tp if is_cut else 0
                    slab = slab.cut(0, place * part, (place + 1) * part) if is_cut else slab
                    found[rank].append(slab)
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_lacking_bytes_are_what_transfers_move(tied: bool) -> None:
    plans = [p for p in map(random_plan, range(150)) if p.num_layers == SMALL.num_layers]
    policy = MemoryPolicy()
    compared = 0
    for old, new in pairwise(plans):
        devices = max((old.devices, new.devices), key=len)
        problem = problem_of(
            replace(old, devices=devices), shape=replace(SMALL, tied=tied), policy=policy
        )
        expected: dict[int, int] = {}
        for one in plan_transfers(held_slabs(old, tied), held_slabs(new, tied)):
            size = 12 * one.slab.elements
            expected[one.destination] = expected.get(one.destination, 0) + size
        assert lacking_bytes(problem, new) == expected
        compared += bool(expected)
    assert compared > 15


def test_ranks_keep_what_they_hold() -> None:
    problem = problem_of(layout(4, 3, 1))
    assert arranged(problem, (2, 0, 3, 1), (0, 5)) == (0, 1, 2, 3)
    assert arranged(problem, (3, 1), (0, 4)) == (1, 3)
    # A newcomer takes the place of the one that is missing.
    assert arranged(problem, (0, 9, 2, 3), (0, 4)) == (0, 9, 2, 3)
