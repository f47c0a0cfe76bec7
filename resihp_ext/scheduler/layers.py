"""How many layers each stage gets.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace

Load = Callable[[int, int], float]
"""Seconds of a stage, by its index, with so many layers."""
Depths = tuple[int, ...]
"""Layers of each stage."""


def repartitioned(depths: Depths, speeds: Sequence[float], limits: Sequence[int]) -> Depths | None:
    """The paper's layer repartition: less for stages that lost speed.

    Each stage starts with ``floor(old * speed)``, at least 1; the layers left go, one by one, to
    the stage with the least load (layers per unit of speed, the new one counted), of equal ones to
    the fastest.

    Args:
        depths: Layers of each stage before.
        speeds: Of each stage, as a part of what it was.
        limits: Most layers that fit.

    Returns:
        The new layers; None if they do not fit.
    """
    # The product of two floats may fall short of the whole number that is meant.
    floors = [int(old * speed + 1e-9) for old, speed in zip(depths, speeds, strict=True)]
    found = [max(1, min(floor, limit)) for floor, limit in zip(floors, limits, strict=True)]
    for _ in range(sum(depths) - sum(found)):
        room = [index for index, limit in enumerate(limits) if found[index] < limit]
        if not room:
            return None
        least = min(room, key=lambda i: (round((found[i] + 1) / speeds[i], 9), -speeds[i], i))
        found[least] += 1
    if any(depth > limit for depth, limit in zip(found, limits, strict=True)):
        return None
    return tuple(found)


def balanced(num_layers: int, load: Load, limits: Sequence[int]) -> Depths | None:
    """The layers that make the slowest stage as fast as it can be; None if they do not fit.

    Giving each layer to the stage that is fastest with it is optimal, since loads only grow.
    """
    count = len(limits)
    if min(limits) < 1 or sum(limits) < num_layers or count > num_layers:
        return None
    found = [1] * count
    queue = [(load(i, 2), i) for i in range(count) if limits[i] > 1]
    heapify(queue)
    for _ in range(num_layers - count):
        _, i = queue[0]
        found[i] += 1
        if found[i] < limits[i]:
            heapreplace(queue, (load(i, found[i] + 1), i))
        else:
            heappop(queue)
    return tuple(found)


def compositions(num_layers: int, limits: Sequence[int]) -> Iterator[Depths]:
    """Every way to give each stage at least one layer and at most its limit."""
    if len(limits) == 1:
        if 1 <= num_layers <= limits[0]:
            yield (num_layers,)
        return
    most = min(limits[0], num_layers - len(limits) + 1)
    for depth in range(1, most + 1):
        for rest in compositions(num_layers - depth, limits[1:]):
            yield (depth, *rest)


def neighbours_of(depths: Depths, source: int, limits: Sequence[int]) -> Iterator[Depths]:
    """Every way to move one layer of a stage to another one."""
    if depths[source] < 2:
        return
    for target, limit in enumerate(limits):
        if target != source and depths[target] < limit:
            moved = list(depths)
            moved[source] -= 1
            moved[target] += 1
            yield tuple(moved)


def edges(depths: Depths) -> tuple[tuple[int, int], ...]:
    """First layer and one past the last, of each stage."""
    at, found = 0, []
    for depth in depths:
        found.append((at, at + depth))
        at += depth
    return tuple(found)
