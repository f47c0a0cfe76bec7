"""Which lasting faults a job refuses, whatever machine it runs on."""

from __future__ import annotations

from resihp_ext.faults.fault import By, Fault, Kind


def is_emulated(fault: Fault) -> bool:
    """Whether a fault acts on emulated devices, where devices are."""
    return fault.kind is Kind.SLOW_LINK or fault.by in (None, By.EMULATED)


def refusal(fault: Fault, *, emulated: bool, tagged: bool) -> str | None:
    """Why a job cannot carry out a lasting fault, on any machine; None when one can.

    Args:
        emulated: Whether its devices are emulated.
        tagged: Whether its backend tells messages apart by tags.
    """
    link = fault.kind is Kind.SLOW_LINK
    if fault.by is By.EMULATED and not emulated:
        return "slow by emulated needs emulated devices (--resilience-emulate)"
    stated = fault.bandwidth_mib_s is not None
    if link and emulated and (stated or fault.delay_ms is not None or fault.factor is None):
        return "slow_link of emulated devices needs factor, and nothing else"
    if link and not emulated and not (stated or fault.factor is None or fault.ends_others):
        return "slow_link of a real network needs bandwidth_mib_s with factor, or delay_ms"
    if link and not emulated and not tagged:
        return "slow_link of a real network needs --distributed-backend gloo"
    return None
