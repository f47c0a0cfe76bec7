"""How many micro-batches each replica gets.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Some replicas that are equally fast."""

    count: int
    seconds: Callable[[int], float]
    """Pipeline time of one of them with so many micro-batches; grows with them."""
    about_s: Callable[[int], float]
    """The same, less exactly and faster."""
    each_s: float
    """About the time of each further micro-batch."""


def estimated(shares: Sequence[Share], micro_batches: int) -> tuple[float, list[int]]:
    """About the time in which all replicas do all micro-batches, and the most that each does.

    Close to a number of micro-batches, times are straight lines: where these let all replicas end
    together, the next lines are taken.
    """
    replicas = sum(one.count for one in shares)
    near = [max(1, micro_batches // replicas)] * len(shares)
    for _ in range(3):
        starts = [one.about_s(m) - m * one.each_s for one, m in zip(shares, near, strict=True)]
        limit_s = _meeting_s(shares, starts, micro_batches)
        near = [
            max(1, int((limit_s - start) / one.each_s))
            for one, start in zip(shares, starts, strict=True)
        ]
    found = [_within(one, m, limit_s) for one, m in zip(shares, near, strict=True)]
    while sum(one.count * m for one, m in zip(shares, found, strict=True)) < micro_batches:
        best = min(range(len(shares)), key=lambda i: (shares[i].about_s(found[i] + 1), i))
        found[best] += 1
    return max(one.about_s(m) for one, m in zip(shares, found, strict=True) if m), found


def _within(one: Share, micro_batches: int, limit_s: float) -> int:
    """As many, or as few as it takes to stay within a time."""
    while micro_batches and one.about_s(micro_batches) > limit_s * (1 + 1e-9):
        micro_batches -= 1
    return micro_batches


def _meeting_s(shares: Sequence[Share], starts: Sequence[float], micro_batches: int) -> float:
    """When straight lines have done all micro-batches together; lines that would start later do
    none."""
    order = sorted(range(len(shares)), key=lambda index: starts[index])
    speed = done = 0.0
    limit_s = starts[order[0]]
    for index in order:
        if speed and done + (starts[index] - limit_s) * speed >= micro_batches:
            break
        done += (starts[index] - limit_s) * speed
        limit_s = starts[index]
        speed += shares[index].count / shares[index].each_s
    return limit_s + (micro_batches - done) / speed


def balanced_shares(shares: Sequence[Share], micro_batches: int) -> tuple[list[int], float]:
    """The split that ends first.

    Starts from the estimate. Then takes a micro-batch from the slowest class and gives others as
    many as they can do in less time, until they cannot: no split is faster, as long as times grow
    with the number of micro-batches.

    Returns:
        Micro-batches of each replica of each class at most, and the time. Together they may exceed
        what there is: see :func:`dealt_counts`.
    """
    _, found = estimated(shares, micro_batches)

    def seconds(index: int, more: int = 0) -> float:
        number = found[index] + more
        return shares[index].seconds(number) if number else 0.0

    places = range(len(shares))
    while True:
        slowest = max(places, key=lambda index: (seconds(index), -index))
        now_s, before = seconds(slowest), list(found)
        found[slowest] -= 1
        while sum(one.count * m for one, m in zip(shares, found, strict=True)) < micro_batches:
            others = [index for index in places if index != slowest and seconds(index, 1) < now_s]
            if not others:
                return before, now_s
            found[min(others, key=lambda index: (seconds(index, 1), index))] += 1


def dealt_counts(
    shares: Sequence[Share], most: Sequence[int], micro_batches: int
) -> list[list[int]]:
    """Micro-batches of every single replica of each class: the surplus is taken from the slowest.

    Args:
        most: As :func:`balanced_shares` says.
    """
    found = [[m] * one.count for one, m in zip(shares, most, strict=True)]
    surplus = sum(map(sum, found)) - micro_batches
    while surplus > 0:
        index = max(
            (i for i in range(len(shares)) if max(found[i], default=0)),
            key=lambda i: (shares[i].about_s(max(found[i])), -i),
        )
        last = len(found[index]) - 1 - found[index][::-1].index(max(found[index]))
        found[index][last] -= 1
        surplus -= 1
    return found
