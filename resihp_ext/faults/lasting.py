"""What slow faults leave of a device or a link at a step.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from resihp_ext.faults.fault import LASTING, Fault, Kind


def lasting(faults: Iterable[Fault]) -> tuple[Fault, ...]:
    """Those that begin at a step and last."""
    return tuple(one for one in faults if one.kind in LASTING)


def device_left(faults: Iterable[Fault], rank: int, node: str, step: int) -> float:
    """Part of its speed that a device has; several faults multiply."""
    return prod(
        one.factor or 1.0
        for one in faults
        if one.kind is Kind.SLOW and _lasts(one, step) and (one.rank == rank or one.node == node)
    )


def link_left(faults: Iterable[Fault], here: str, there: str, step: int) -> float:
    """Part of its bandwidth that the network between two nodes has."""
    return prod(
        one.factor or 1.0
        for one in faults
        if one.kind is Kind.SLOW_LINK and _lasts(one, step) and {here, there} == set(one.link or ())
    )


def _lasts(fault: Fault, step: int) -> bool:
    return fault.at_step <= step and (fault.until_step is None or step < fault.until_step)
