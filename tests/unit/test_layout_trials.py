"""What the proofs of uneven layouts rest on: kinds of plans, random plans, criteria."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from megatron.resilience.testing.parity import CLIP, Reference
from megatron.resilience.testing.random_layouts import LayoutKind, Wanted, kinds, random_layout
from megatron.resilience.testing.trial import Slice, Trial, assemble, disagreements
from resihp_ext.plan.plan import Device, Plan, Replica, Stage, uniform_plan
from resihp_ext.plan.timetable import straight_routes

pytestmark = pytest.mark.unit

K = LayoutKind


def plan(
    *replicas: list[tuple[tuple[int, ...], int]],
    shares: list[int] | None = None,
    slow: tuple[int, ...] = (),
    ranks: int = 8,
) -> Plan:
    built = []
    for stages in replicas:
        at, found = 0, []
        for group, depth in stages:
            found.append(Stage(ranks=group, layers=(at, at + depth)))
            at += depth
        built.append(Replica(stages=tuple(found)))
    return Plan(
        version=0,
        num_layers=4,
        devices=tuple(Device(rank=r, node=r // 2, p=0.5 if r in slow else 1) for r in range(ranks)),
        replicas=tuple(built),
        routes=straight_routes(tuple(built), shares, 8),
    ).validated()


def crossing(one: Plan) -> Plan:
    """Exchanges the second stages of two micro-batches."""
    a, b, *rest = one.routes
    return replace(one, routes=((a[0], b[1]), (b[0], a[1]), *rest)).validated()


TWO_STAGES = [((0, 1), 2), ((2, 3), 2)], [((4, 5), 2), ((6, 7), 2)]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (plan(*TWO_STAGES), set()),
        (plan(*TWO_STAGES, shares=[3, 5]), {K.SHARES}),
        (crossing(plan(*TWO_STAGES)), {K.CROSSING}),
        (plan([((0, 1), 3), ((2, 3), 1)], [((4, 5), 3), ((6, 7), 1)]), {K.DEPTHS}),
        (plan([((0, 1), 2), ((2, 3), 2)], [((4, 5), 4)]), {K.MAPS}),
        (plan([((0, 1), 2), ((2,), 2)], [((4, 5), 2), ((6, 7), 2)]), {K.DEGREES}),
        (plan([((0, 1), 2), ((2,), 2)], [((4, 5), 2), ((6,), 2)]), set()),
        (plan([((0, 1), 4)], [((2,), 4)]), set()),
        (plan([((0, 1, 2), 4)], [((3, 4, 5), 4)]), {K.ODD_DEGREES}),
        # Rank 1 is slow and stands by; its neighbour works with rank 2, or idles, or works alone.
        (plan([((0, 2), 4)], slow=(1,)), {K.POOLED}),
        (plan([((2, 3), 4)], slow=(1,)), set()),
        (plan([((0,), 4)], slow=(1,)), set()),
        (plan([((0, 2), 4)]), set()),
    ],
)
def test_kinds(found: Plan, expected: set[LayoutKind]) -> None:
    assert kinds(found) == expected


def test_uniform_plans_have_no_kind() -> None:
    for tp, pp, dp in ((1, 1, 1), (2, 2, 2), (4, 1, 2), (1, 4, 2)):
        assert not kinds(uniform_plan(num_layers=4, tp=tp, pp=pp, dp=dp, micro_batches=8))


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("kind", LayoutKind)
def test_random_plans_are_what_is_wanted(kind: LayoutKind, chunks: int) -> None:
    wanted = Wanted(num_layers=6, micro_batches=8, degrees=(1, 2, 3), kinds={kind}, chunks=chunks)
    for seed in range(10):
        found = random_layout(Random(seed), wanted)
        assert found == random_layout(Random(seed), wanted)
        assert kind in kinds(found.validated())
        assert found.micro_batches == 8
        assert 4 <= len(found.devices) <= 8
        assert {s.tp for one in found.replicas for s in one.stages} <= {1, 2, 3}
        assert len(found.chunks(found.hosts[0])) == chunks
    assert len({random_layout(Random(seed), wanted).digest for seed in range(10)}) > 5


def trial(
    losses: list[float], norms: list[float], weight: float = 1.0, disagreements: int = 0
) -> Trial:
    return Trial(
        losses=losses,
        grad_norms=norms,
        weights={"w": np.full(4, weight, dtype=np.float32)},
        disagreements=disagreements,
        events=[],
    )


ONE = trial([5.0, 4.0], [2.0, 1.0])


@pytest.mark.parametrize(
    ("found", "broken"),
    [
        (ONE, []),
        (trial([5.0, 4.00003], [2.0, 1.0]), []),
        (trial([5.0, 4.00005], [2.0, 1.0]), ["rel_diff"]),
        (trial([5.0, math.nan], [2.0, 1.0]), ["rel_diff"]),
        (trial([5.0, 4.0], [2.0, 1.00006]), ["rel_diff_grad_norm"]),
        (trial([5.0, 4.0], [2.0, 1.0], weight=1 + 2 * 2**-23), []),
        (trial([5.0, 4.0], [2.0, 1.0], weight=1 + 3 * 2**-23), ["weight_diff_ratio"]),
        (trial([5.0, 4.0], [2.0, 1.0], disagreements=1), ["disagreements"]),
        (trial([5.0, 4.0], [2.0, 1.0], weight=math.nan), ["weight_diff_ratio"]),
        (replace(ONE, weights={}), ["weight_diff_ratio"]),
        (replace(ONE, weights={"w": np.ones(5, np.float32)}), ["weight_diff_ratio"]),
    ],
)
def test_criteria(found: Trial, broken: list[str]) -> None:
    assert Reference(one=ONE).verdict(found).broken == broken


def test_weights_may_be_as_far_as_twice_the_uniform_run() -> None:
    reference = Reference(one=ONE, uniform=(trial([5.0], [2.0], weight=1.25),))
    assert reference.verdict(trial([5.0, 4.0], [2.0, 1.0], weight=1.5)).broken == []
    far = reference.verdict(trial([5.0, 4.0], [2.0, 1.0], weight=1.75))
    assert far.broken == ["weight_diff_ratio"]


def test_half_precision_is_measured_by_the_largest_noise_of_uniform_runs() -> None:
    uniform = trial([5.1, 4.1], [2.1, 1.1], weight=1.5), trial([5.0, 4.0], [2.2, 1.2], weight=1.25)
    reference = Reference(one=ONE, uniform=uniform, half=True)
    assert reference.verdict(trial([5.1, 4.1], [2.3, 1.3], weight=2.0)).broken == []
    assert reference.verdict(trial([5.3, 4.3], [2.5, 1.5], weight=2.5)).broken == [
        "rel_diff_ratio",
        "rel_diff_grad_norm_ratio",
        "weight_diff_ratio",
    ]
    ill = reference.verdict(trial([math.nan, 4.0], [2.0, math.nan], weight=math.nan))
    assert len(ill.broken) == 3


def test_clipping_must_be_active_and_steps_the_same() -> None:
    with pytest.raises(ValueError, match=r"clipping at 0\.3 is not active"):
        Reference(one=trial([5.0, 4.0], [2.0, CLIP]))
    with pytest.raises(ValueError, match="cannot compare 1 steps with 2"):
        Reference(one=ONE).verdict(trial([5.0], [2.0]))


def piece(low: int, values: list[float], *, main: bool) -> Slice:
    data = np.array(values, dtype=np.float32)
    return Slice(tensor="w", shape=(4,), offset=(low,), values=data, main=main)


def test_owners_are_compared_bit_by_bit() -> None:
    first = [piece(0, [1.0, 0.0], main=True), piece(2, [3.0, 4.0], main=True)]
    weights = assemble([first])
    assert weights["w"].tolist() == [1.0, 0.0, 3.0, 4.0]
    same = [piece(1, [0.0, 3.0], main=False)]
    other = [piece(1, [-0.0, np.nextafter(np.float32(3), np.float32(4))], main=False)]
    assert disagreements([first, same], weights) == 0
    assert disagreements([first, other], weights) == 2, "a sign of zero, and a last bit"


@pytest.mark.parametrize(
    "pieces",
    [
        [piece(0, [1.0, 2.0], main=True)],
        [piece(0, [1.0, 2.0, 3.0], main=True), piece(2, [3.0, 4.0], main=True)],
    ],
    ids=["holes", "overlaps"],
)
def test_every_element_has_one_first_owner(pieces: list[Slice]) -> None:
    with pytest.raises(ValueError, match="do not cover the tensor exactly once"):
        assemble([pieces])
