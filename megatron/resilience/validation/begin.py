"""Puts together what measures on this rank."""

from __future__ import annotations

from megatron.resilience.executor.executor import Executor
from megatron.resilience.validation.bench import Bench, DeviceBench
from megatron.resilience.validation.emulated import EmulatedBench
from megatron.resilience.validation.exchange import Exchange
from megatron.resilience.validation.validator import Guard, Told, Validator


def validator_of(executor: Executor, told: Told, guard: Guard) -> Validator:
    """For the rank of an executor."""
    return Validator(told, guard, lambda: _bench(executor, told.rank), executor.clock.apart)


def _bench(executor: Executor, rank: int) -> Bench:
    exchange = Exchange(executor.device, executor.world.number)
    if executor.player.pacer is None:
        return DeviceBench(executor.device, exchange)
    node_of = {one.rank: one.node for one in executor.plan.devices}
    return EmulatedBench(
        executor.player.pacer, exchange, lambda other: node_of.get(other) != node_of.get(rank)
    )
