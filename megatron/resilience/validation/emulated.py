"""The micro-benchmarks on emulated devices: as long as they would take there.

Messages are really sent, and whoever receives one waits until it would have arrived.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron.resilience.emulation.pacer import NAME_BYTES, Pacer
from megatron.resilience.validation.bench import REPETITIONS, ping_pong, ring
from megatron.resilience.validation.exchange import Exchange
from resihp_ext.emulation.probes import ProbePrices

_SPIN_S = 2e-4
"""A sleep ends late by less than this on an idle core: the rest is waited for awake."""


class EmulatedBench:
    """On an emulated device."""

    def __init__(self, pacer: Pacer, exchange: Exchange, across: Callable[[int], bool]) -> None:
        """Prepares it.

        Args:
            across: Whether a rank is on another node than this one, in the plan that runs.
        """
        self._pacer, self._exchange, self._across = pacer, exchange, across
        self._prices = ProbePrices(pacer.scene)
        self._salt = 0

    def gemm_s(self) -> list[float]:
        """The cost model's time of the products of a layer, over the device's present speed."""
        healthy_s = self._prices.gemm_s
        return [
            _timed(lambda: wait_out(self._pacer.device_s(healthy_s, self._next())))
            for _ in range(REPETITIONS)
        ]

    def p2p_s(self, partner: int, *, first: bool) -> list[float]:
        """The message says on which node its sender is."""
        name = self._exchange.tensor(NAME_BYTES)
        mine = self._pacer.node.encode()[:NAME_BYTES].ljust(NAME_BYTES, b"\0")
        theirs = name.clone()
        name.copy_(theirs.new_tensor(list(mine)))
        self._exchange.run(*(([(name, partner)], [(theirs, partner)])))
        there = bytes(theirs.tolist()).rstrip(b"\0").decode(errors="replace")
        wire_s = self._prices.message_s(across=self._across(partner))

        def arrived() -> None:
            wait_out(self._pacer.wire_s(wire_s, there, self._next()))

        turn = ping_pong(self._exchange, name, partner, first=first, arrived=arrived)
        found = [_timed(turn) / 2 for _ in range(REPETITIONS)]
        return found if first else []

    def all_reduce_s(self, ranks: Sequence[int], me: int) -> list[float]:
        """Each waits for itself, as in other collectives."""
        across = any(self._across(rank) for rank in ranks)
        healthy_s = self._prices.all_reduce_s(len(ranks), across=across)

        def turn() -> None:
            begun_s = time.perf_counter()
            ring(self._exchange, ranks, me, NAME_BYTES)
            lasts_s = self._pacer.wire_s(healthy_s, self._pacer.node, self._next())
            wait_out(lasts_s - (time.perf_counter() - begun_s))

        return [_timed(turn) for _ in range(REPETITIONS)]

    def _next(self) -> str:
        """Names a time, for its noise."""
        self._salt += 1
        return f"probe {self._salt}"


def wait_out(seconds: float) -> None:
    """Waits, more exactly than a sleep does."""
    until_s = time.perf_counter() + seconds
    if seconds > _SPIN_S:
        time.sleep(seconds - _SPIN_S)
    while time.perf_counter() < until_s:
        pass


def _timed(work: Callable[[], None]) -> float:
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s
