"""The time of messages between two devices, and of collectives made of them.

The alpha-beta model: a message takes a latency plus its bytes over a bandwidth. Collectives are
rings (Thakur, Rabenseifner, Gropp: "Optimization of Collective Communication Operations in MPICH",
2005).

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """One direction of the path between two devices."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        if self.latency_s < 0 or not self.bytes_per_s > 0:
            raise ValueError(
                f"link: latency {self.latency_s} s must not be negative and bandwidth "
                f"{self.bytes_per_s} bytes/s must be positive"
            )

    def message_s(self, size_bytes: float) -> float:
        """One message; nothing to send takes no time."""
        return self.latency_s + size_bytes / self.bytes_per_s if size_bytes > 0 else 0.0

    def all_gather_s(self, size_bytes: float, ranks: int) -> float:
        """``size_bytes`` in all, gathered by every one of ``ranks`` (a reduce-scatter, too)."""
        return (ranks - 1) * self.message_s(size_bytes / ranks)

    def all_reduce_s(self, size_bytes: float, ranks: int) -> float:
        """``size_bytes`` on each of ``ranks``: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather_s(size_bytes, ranks)
