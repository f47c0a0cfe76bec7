"""The micro-benchmarks on real devices: matrix products, messages, small rings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from megatron.resilience.timing.marks import Marks, marks_for
from megatron.resilience.validation.exchange import Exchange

WARM_UP = 2
"""Repetitions that do not count: memory, caches and clocks of the device."""
REPETITIONS = 7

_WIDTH = {"cpu": 384, "cuda": 4096}
"""Of square matrices."""
_PRODUCTS = {"cpu": 1, "cuda": 8}
"""In a repetition; one or two milliseconds on the devices of today."""
_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}
_MESSAGE_BYTES = {"cpu": 1 << 20, "cuda": 16 << 20}
_RING_BYTES = 64 << 10
"""Of what all have at the end; small, so that latencies count."""


class Bench(Protocol):
    """Measures; every method returns the seconds of each repetition."""

    def gemm_s(self) -> list[float]:
        """Matrix products on this rank's device."""

    def p2p_s(self, partner: int, *, first: bool) -> list[float]:
        """A message there and back between this rank and another, halved; of the first end."""

    def all_reduce_s(self, ranks: Sequence[int], me: int) -> list[float]:
        """A ring over some ranks."""


class DeviceBench:
    """On the device that trains."""

    def __init__(self, device: torch.device, exchange: Exchange) -> None:
        self._device, self._exchange = device, exchange
        self._kind = "cuda" if device.type == "cuda" else "cpu"

    def gemm_s(self) -> list[float]:
        """Nothing if the device has no memory left for it: training needs it more."""
        width, count = _WIDTH[self._kind], _PRODUCTS[self._kind]
        try:
            shape = (width, width)
            left, right, product = (
                torch.full(shape, 0.5, dtype=_DTYPE[self._kind], device=self._device)
                for _ in range(3)
            )
        except torch.OutOfMemoryError:
            return []

        def products() -> None:
            for _ in range(count):
                torch.mm(left, right, out=product)

        with torch.no_grad():
            return self._timed(products)

    def p2p_s(self, partner: int, *, first: bool) -> list[float]:
        message = self._exchange.tensor(_MESSAGE_BYTES[self._kind])
        there_and_back = ping_pong(self._exchange, message, partner, first=first)
        return [one / 2 for one in self._timed(there_and_back)] if first else _apart(there_and_back)

    def all_reduce_s(self, ranks: Sequence[int], me: int) -> list[float]:
        return self._timed(lambda: ring(self._exchange, ranks, me, _RING_BYTES // len(ranks)))

    def _timed(self, work: Callable[[], None]) -> list[float]:
        for _ in range(WARM_UP):
            work()
        marks: Marks = marks_for(self._device)
        pairs = []
        for _ in range(REPETITIONS):
            begun = marks.mark()
            work()
            pairs.append((begun, marks.mark()))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return [marks.between_s(*pair) for pair in pairs]


def _apart(work: Callable[[], None]) -> list[float]:
    """The same number of repetitions, which the other end measures."""
    for _ in range(WARM_UP + REPETITIONS):
        work()
    return []


def ping_pong(
    exchange: Exchange,
    message: torch.Tensor,
    partner: int,
    *,
    first: bool,
    arrived: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """One message there and back, as either end has to do it.

    Args:
        arrived: Called when a message is here.
    """

    def send() -> None:
        exchange.run([(message, partner)], [])

    def receive() -> None:
        exchange.run([], [(message, partner)])
        arrived()

    def first_end() -> None:
        send()
        receive()

    def second_end() -> None:
        receive()
        send()

    return first_end if first else second_end


def ring(exchange: Exchange, ranks: Sequence[int], me: int, size_bytes: int) -> None:
    """The messages of an all-reduce over a ring: once around to reduce, once to gather."""
    place = list(ranks).index(me)
    after, before = ranks[(place + 1) % len(ranks)], ranks[place - 1]
    mine, theirs = exchange.tensor(size_bytes), exchange.tensor(size_bytes)
    for _ in range(2 * (len(ranks) - 1)):
        exchange.run([(mine, after)], [(theirs, before)])
        mine, theirs = theirs, mine
