"""Published figures of devices and networks, and the part of them that training reaches.

What makers promise comes from their data sheets. What is reached is chosen so that published runs
come out right, which ``tests/unit/test_cost_figures.py`` checks:

* a100: GPT with 175, 530 and 1008 billion parameters, within 10 % of the iteration times of
  Korthikanti et al. 2022 (arXiv 2205.05198, table 5);
* h100, h200: Llama 3 405B on 8,192 GPUs, within 10 % of the 430 TFLOP/s of each (Grattafiori et al.
  2024, arXiv 2407.21783, table 4);
* NVLink: NCCL's maintainers name about 20 % of overhead (nccl-tests, issue 212). The same is taken
  for InfiniBand.

Attention under causal masks, 128 channels a head: FlashAttention-2 reaches up to 73 % of an A100
without a mask (Dao 2023, arXiv 2307.08691), cuDNN 539 of 989 TFLOP/s on an H100 with one (Shah et
al. 2024, arXiv 2407.08608, figure 5); taken are 60 % and 50 %.

Memory: 80 % of the data sheet. Latencies, and the fixed part of a transition on GPUs, are
assumptions: sweep them before you rely on a figure that depends on them. ``resihp profile``
measures a real machine instead.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.cost.link import Link


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """One kind of device and its network."""

    peak_flops: float
    """Of matrix products in the element type, without sparsity."""
    matrix_utilisation: float
    attention_utilisation: float
    memory_bytes_per_s: float
    memory_utilisation: float
    inside: Link
    between: Link
    element_bytes: int
    device_memory_bytes: int
    fixed_transition_s: float
    step_bytes: int = 30
    """Moved by Adam for a parameter: gradient, master and two moments in 32 bits, all but the
    gradient read and written, and the parameter written in 16 bits."""


def _network(line_bytes_per_s: float, latency_s: float) -> Link:
    """One direction of a link of which protocols leave 80 %."""
    return Link(latency_s=latency_s, bytes_per_s=0.8 * line_bytes_per_s)


FIGURES = {
    # NVIDIA A100 80GB SXM data sheet: 312 TFLOP/s bf16, 2,039 GB/s, NVLink 600 GB/s both ways
    # together. HDR InfiniBand: 200 Gb/s, one port a GPU (DGX A100).
    "a100": Figures(
        peak_flops=312e12,
        matrix_utilisation=0.66,
        attention_utilisation=0.60,
        memory_bytes_per_s=2.039e12,
        memory_utilisation=0.80,
        inside=_network(300e9, 3e-6),
        between=_network(25e9, 5e-6),
        element_bytes=2,
        device_memory_bytes=80 * 2**30,
        fixed_transition_s=2.0,
    ),
    # NVIDIA H100 SXM data sheet: 1,979 TFLOP/s bf16 with sparsity, hence 989.5 without, 3.35 TB/s,
    # NVLink 900 GB/s both ways together. NDR InfiniBand: 400 Gb/s, one port a GPU (DGX H100).
    "h100": Figures(
        peak_flops=989.5e12,
        matrix_utilisation=0.56,
        attention_utilisation=0.50,
        memory_bytes_per_s=3.35e12,
        memory_utilisation=0.80,
        inside=_network(450e9, 3e-6),
        between=_network(50e9, 5e-6),
        element_bytes=2,
        device_memory_bytes=80 * 2**30,
        fixed_transition_s=2.0,
    ),
    # NVIDIA H200 SXM data sheet: the H100's arithmetic and NVLink with 141 GB at 4.8 TB/s.
    "h200": Figures(
        peak_flops=989.5e12,
        matrix_utilisation=0.56,
        attention_utilisation=0.50,
        memory_bytes_per_s=4.8e12,
        memory_utilisation=0.80,
        inside=_network(450e9, 3e-6),
        between=_network(50e9, 5e-6),
        element_bytes=2,
        device_memory_bytes=141 * 10**9,
        fixed_transition_s=2.0,
    ),
    # Measured, fp32, on one core of an AMD EPYC 9005: products of 1024 x 1024 matrices, of which
    # layers of 128 channels reach 60 %; attention with 16 channels a head; a copy, of which unfused
    # layers and Adam reach a quarter; gloo's loopback on an idle machine (on a busy one its latency
    # was 2 ms); a change of layout of eight ranks of the preset tiny, 0.5 to 1.7 s.
    "cpu": Figures(
        peak_flops=100e9,
        matrix_utilisation=0.60,
        attention_utilisation=0.35,
        memory_bytes_per_s=16e9,
        memory_utilisation=0.25,
        inside=Link(latency_s=100e-6, bytes_per_s=2.5e9),
        between=Link(latency_s=100e-6, bytes_per_s=2.5e9),
        element_bytes=4,
        device_memory_bytes=2 * 2**30,
        fixed_transition_s=1.0,
    ),
}
