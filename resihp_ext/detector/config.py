"""Settings of the detector.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from resihp_ext.errors import UserError


@dataclass(frozen=True, kw_only=True, slots=True)
class DetectorConfig:
    """Detection of slow devices."""

    settle_steps: int = 12
    """Steps from which the first fit and all healthy levels are made."""
    warm_up_steps: int = 2
    """Steps that are ignored at the start and after each change of layout."""
    device_over_ratio: float = 1.15
    """A device is suspected when its own work takes this many times as long as predicted."""
    link_over_ratio: float = 1.2
    """A link is suspected when a transfer takes this many times as long as it used to."""
    link_excess_s: float = 5e-5
    """And by at least so many seconds: less than this is the jitter of timers."""
    link_step_ratio: float = 0.005
    """And all transfers of a step together by at least this part of a usual step: what costs less
    is worth nobody's attention, and where messages are short it is jitter."""
    link_chance: float = 1e-6
    """A link is reported when chance alone would show its last steps in a row with at most this
    probability, judged by how often single steps of it looked the same before."""
    confirm_steps: int = 3
    """Steps in a row that must show a change before it is reported."""
    verify_ratio: float = 0.10
    """Means on both sides of a change differ by more than this part of the larger one."""
    verify_distance_steps: int = 10
    """Least distance of two change points of the iteration time."""
    validate_over_ratio: float = 1.25
    """An iteration is slow when it takes this many times as long as predicted."""
    recovered_ratio: float = 1.07
    """A slow device or link has recovered when it is below this multiple of its healthy time."""
    further_ratio: float = 1.25
    """A known slow device is reported again when it has become slower by this factor."""
    pardon_steps: int = 200
    """For so many steps a device that was validated as healthy is not suspected again at the same
    level."""
    noise_limit: float = 5.0
    """A change must be this many times the usual noise of its series."""
    hazard_steps: float = 250.0
    """Expected steps between two change points of the iteration time."""
    longest_run_steps: int = 300
    """Run lengths beyond this one are one."""
    forget_steps: float = 500.0
    """Steps after which the weight of a sample in the fits has fallen to 1/e."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise UserError(f"detector: {field.name} must be positive")
        if min(self.device_over_ratio, self.link_over_ratio, self.validate_over_ratio) <= 1:
            raise UserError("detector: ratios of slow to healthy times must be above 1")
