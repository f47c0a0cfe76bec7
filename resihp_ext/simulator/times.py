"""What takes time in a job beside its steps: every figure that no cost model gives, by its source.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Seconds, unless said otherwise."""

    notice_s: float = 0.1
    """From a death to everybody's knowledge of it: closed connections, measured on real jobs (0.04
    to 0.16 s). The same for every policy."""
    checkpoint_every_s: float = 1800.0
    """Between two checkpoints; an assumption, to be swept."""
    checkpoint_s: float = 0.0
    """By which a checkpoint holds training up; 0: saved beside it."""
    restart_s: float = 120.0
    """Of a whole job: scheduler, processes, imports, groups, model, first step, without the
    reading of the checkpoint; an assumption, to be swept."""
    storage_bytes_per_s: float = 2e9
    """With which a node reads its part of a checkpoint; an assumption, to be swept."""
    regroup_s: float = 2.0
    """Of a change inside running processes beside moving state: agreeing, planning, groups,
    modules."""
    validation_s: float = 0.045
    """Of our validation, which stops a few ranks only; PAPER: 34 to 49 ms."""
    greyhound_validation_s: float = 1.5
    """Of Greyhound's, which stops all ranks; PAPER: 1.24 to 1.72 s."""
    greyhound_profiling_s: float = 20.0
    """Before it, with training going on (BASELINES 3.5)."""
    probe_every_s: float = 60.0
    """Between two looks at devices that are not part of the layout."""
    iteration_noise: float = 0.01
    """Of an iteration and of a device's own work, relative: a standard deviation."""
