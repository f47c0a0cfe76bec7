"""Which devices there are, and how much each can hold.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from resihp_ext.cost.presets import FIGURES
from resihp_ext.plan.plan import Device

UNCOUNTED = 10
"""One part in so many of a device's memory is left for what the memory model does not count; an
assumption, to be checked on the device."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a planner may use."""

    devices: tuple[Device, ...]
    memory_bytes: int
    """Of each device, for what the memory model counts: without the context of CUDA, buffers of
    NCCL and what the allocator wastes."""

    @cached_property
    def alive(self) -> tuple[Device, ...]:
        """Devices that can take part at all."""
        return tuple(device for device in self.devices if device.alive)

    @cached_property
    def node_of(self) -> dict[int, int]:
        """Node of each global rank."""
        return {device.rank: device.node for device in self.devices}


def uniform_cluster(*, nodes: int, devices_per_node: int, memory_bytes: int) -> Cluster:
    """A cluster of healthy, equal nodes; ranks are numbered node by node."""
    devices = tuple(
        Device(rank=rank, node=rank // devices_per_node) for rank in range(nodes * devices_per_node)
    )
    return Cluster(devices=devices, memory_bytes=memory_bytes)


def usable_memory_bytes(name: str) -> int:
    """What a device of a preset leaves for :attr:`Cluster.memory_bytes`."""
    whole = FIGURES[name].device_memory_bytes
    return whole - whole // UNCOUNTED
