"""How property tests run: the same examples every time, on every machine."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

# A busy machine must not decide whether a test passes: no deadline, no complaint about slowness.
settings.register_profile(
    "repeatable",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")
