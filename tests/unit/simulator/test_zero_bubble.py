"""Adaptra's schedule: the closed form, the room, the times of known cases."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from resihp_ext.plan.action import Kind
from resihp_ext.simulator.zero_bubble import adapted_warm_ups, even_warm_ups, zero_bubble

pytestmark = pytest.mark.unit


def test_warm_ups_without_slow_links_fall_evenly() -> None:
    assert even_warm_ups(4, 4) == (4, 3, 2, 1)
    assert even_warm_ups(7, 4) == (7, 5, 3, 1)
    # (9 - 1) mod 3 = 2: the first two differences are 3, the last one 2.
    assert even_warm_ups(9, 4) == (9, 6, 3, 1)
    assert even_warm_ups(5, 1) == (1,)


def test_the_closed_form_of_adapted_warm_ups() -> None:
    assert adapted_warm_ups([1.0] * 4, [0.0] * 3) == (7, 5, 3, 1)
    # Two more forwards for a link that takes 1.5 of them.
    assert adapted_warm_ups([1.0] * 4, [0.0, 1.5, 0.0]) == (9, 7, 3, 1)
    assert adapted_warm_ups([0.5, 1.0, 2.0], [1.0, 1.0]) == (8, 4, 1)
    # 0.3 / 0.1 is a little more than 3.
    assert adapted_warm_ups([0.1, 0.1], [0.1 + 0.2]) == (6, 1)


def test_with_room_for_two_pipelines_there_is_no_bubble() -> None:
    stages, micro_batches = 4, 16
    found = zero_bubble([(1.0, 1.0, 1.0)] * stages, [0.0] * 3, [2 * stages] * stages, micro_batches)
    # Work of the last stage, after the way to it: the least there is.
    assert found.seconds == 3 * micro_batches + stages - 1


def test_with_the_room_of_1f1b_it_is_between_1f1b_and_no_bubble() -> None:
    stages, micro_batches = 4, 16
    rooms = [stages - place for place in range(stages)]
    found = zero_bubble([(1.0, 1.0, 1.0)] * stages, [0.0] * 3, rooms, micro_batches)
    one_forward_one_backward = 3 * (micro_batches + stages - 1)
    assert 3 * micro_batches + stages - 1 <= found.seconds < one_forward_one_backward


def test_adapting_makes_up_for_a_slow_link() -> None:
    stages, micro_batches = 4, 32
    times, rooms = [(1.0, 1.0, 1.0)] * stages, [12] * stages
    healthy = zero_bubble(times, [0.0] * 3, rooms, micro_batches)
    slow = zero_bubble(times, [0.0, 3.0, 0.0], rooms, micro_batches)
    # The delay comes once each way, not with every micro-batch.
    assert slow.seconds <= healthy.seconds + 2 * 3.0


@pytest.mark.parametrize("seed", range(30))
def test_every_order_is_complete_and_within_its_room(seed: int) -> None:
    random = Random(seed)
    stages, micro_batches = random.randint(1, 6), random.randint(1, 12)
    times = [(random.random() + 0.1, random.random(), random.random()) for _ in range(stages)]
    delays = [random.choice([0.0, random.random(), 5 * random.random()]) for _ in times[1:]]
    rooms = [random.randint(1, 8) for _ in times]
    found = zero_bubble(times, delays, rooms, micro_batches)
    assert found.seconds >= max(micro_batches * sum(one) for one in times) - 1e-9
    for order, room in zip(found.orders, rooms, strict=True):
        assert Counter(order) == Counter(
            (kind, m)
            for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
            for m in range(micro_batches)
        )
        held = 0
        for kind, _ in order:
            held += (kind is Kind.FORWARD) - (kind is Kind.WEIGHT)
            assert 0 <= held <= room
        for kind in Kind:
            numbers = [m for k, m in order if k is kind]
            assert all(a < b for a, b in pairwise(numbers))
