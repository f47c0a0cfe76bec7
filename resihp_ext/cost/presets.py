"""Published figures of devices and networks, and the part of them that training reaches.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One kind of device and its network."""

    peak_flops: float
    matrix_utilisation: float
    attention_utilisation: float
    memory_bytes_per_s: float
    memory_utilisation: float
    inside_bytes_per_s: float
    inside_latency_s: float
    between_bytes_per_s: float
    between_latency_s: float
    network_utilisation: float
    element_bytes: int
    transition_s: float
    """Fixed part of a transition: agreeing, planning, building groups."""


FIGURES = {
    "a100": Figures(
        peak_flops=312e12,
        matrix_utilisation=0.70,
        attention_utilisation=0.60,
        memory_bytes_per_s=2.039e12,
        memory_utilisation=0.80,
        inside_bytes_per_s=300e9,
        inside_latency_s=3e-6,
        between_bytes_per_s=25e9,
        between_latency_s=5e-6,
        network_utilisation=0.80,
        element_bytes=2,
        transition_s=2.0,
    ),
    "h100": Figures(
        peak_flops=989.4e12,
        matrix_utilisation=0.65,
        attention_utilisation=0.50,
        memory_bytes_per_s=3.35e12,
        memory_utilisation=0.80,
        inside_bytes_per_s=450e9,
        inside_latency_s=3e-6,
        between_bytes_per_s=50e9,
        between_latency_s=5e-6,
        network_utilisation=0.80,
        element_bytes=2,
        transition_s=2.0,
    ),
    "h200": Figures(
        peak_flops=989.4e12,
        matrix_utilisation=0.65,
        attention_utilisation=0.50,
        memory_bytes_per_s=4.8e12,
        memory_utilisation=0.80,
        inside_bytes_per_s=450e9,
        inside_latency_s=3e-6,
        between_bytes_per_s=50e9,
        between_latency_s=5e-6,
        network_utilisation=0.80,
        element_bytes=2,
        transition_s=2.0,
    ),
    "cpu": Figures(
        peak_flops=100e9,
        matrix_utilisation=0.60,
        attention_utilisation=0.30,
        memory_bytes_per_s=10e9,
        memory_utilisation=0.80,
        inside_bytes_per_s=1e9,
        inside_latency_s=100e-6,
        between_bytes_per_s=1e9,
        between_latency_s=100e-6,
        network_utilisation=1.0,
        element_bytes=4,
        transition_s=0.1,
    ),
}
