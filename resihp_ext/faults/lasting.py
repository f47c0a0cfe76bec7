"""What slow faults leave of a device or a link at a step.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from resihp_ext.faults.fault import Fault, Kind

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Hold:
    """What a slow link adds to messages in one direction, over what the healthy one takes."""

    delay_s: float = 0.0
    """To every message; others pass meanwhile."""
    extra_s_per_byte: float = 0.0
    """To every message by its size."""
    busy_s_per_byte: float = 0.0
    """How long a message keeps the next one out."""


def device_faults(faults: Iterable[Fault], rank: int, node: str, step: int) -> list[Fault]:
    """Those that a device is slow by at a step."""
    return _acting((f for f in faults if f.kind is Kind.SLOW and f.hits(rank, node)), step)


def device_left(faults: Iterable[Fault], rank: int, node: str, step: int) -> float:
    """Part of its speed that a device has; several faults multiply."""
    return prod(one.factor or 1.0 for one in device_faults(faults, rank, node, step))


def link_faults(faults: Iterable[Fault], here: str, there: str, step: int) -> list[Fault]:
    """Those that the network between two nodes is slow by at a step."""
    ends, links = {here, there}, (one for one in faults if one.kind is Kind.SLOW_LINK)
    return _acting((one for one in links if set(one.link or ()) == ends), step)


def link_left(faults: Iterable[Fault], here: str, there: str, step: int) -> float:
    """Part of its bandwidth that the network between two nodes has."""
    return prod(one.factor or 1.0 for one in link_faults(faults, here, there, step))


def link_hold(faults: Iterable[Fault], here: str, there: str, step: int) -> Hold | None:
    """By how much a real link holds messages back; None when it does not.

    Delays add up and factors multiply; of several bandwidths the least counts.
    """
    acting = link_faults(faults, here, there, step)
    if not acting:
        return None
    hold = Hold(delay_s=sum(one.delay_ms or 0.0 for one in acting) / 1000)
    stated = [one.bandwidth_mib_s for one in acting if one.bandwidth_mib_s is not None]
    if not stated:
        return hold
    healthy_s = 1 / (min(stated) * MIB)
    slow_s = healthy_s / prod(one.factor or 1.0 for one in acting)
    return Hold(hold.delay_s, slow_s - healthy_s, slow_s)


def _acting(faults: Iterable[Fault], step: int) -> list[Fault]:
    acting: list[Fault] = []
    for one in faults:
        if not one.lasts_at(step):
            continue
        if one.ends_others:
            acting.clear()
        else:
            acting.append(one)
    return acting
