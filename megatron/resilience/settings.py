"""Our own settings of a job, and the flags made from them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any, Self

from megatron.resilience.checkpoint.config import CheckpointSafetyConfig
from megatron.resilience.data.config import DataConfig
from megatron.resilience.device.choose import DeviceConfig
from megatron.resilience.emulation.config import EmulationConfig
from megatron.resilience.executor.config import ExecutorConfig
from megatron.resilience.faults.config import FaultsConfig
from megatron.resilience.model.config import InitialWeightsConfig
from megatron.resilience.recovery.config import RecoveryConfig
from megatron.resilience.timing.config import TimingConfig
from resihp_ext.control.worth import Terms
from resihp_ext.flags import add_flags, from_namespace


@dataclass(frozen=True, kw_only=True, slots=True)
class ResilienceConfig:
    """Resilience."""

    resilience: bool = False
    """Turns resilience on: under resihp-run the job goes on when ranks die, in another layout."""

    resilience_observe_only: bool = False
    """Only records events and workload of every step in --resilience-dir; Megatron's own schedules
    and optimizers train, and the first rank that dies ends the job."""

    resilience_dir: str | None = None
    """Where events, receipts and plans are written; default: resilience/ beside --save, else
    ./resilience."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """All settings that this project adds to Megatron's."""

    resilience: ResilienceConfig
    executor: ExecutorConfig
    checkpoint: CheckpointSafetyConfig
    faults: FaultsConfig
    emulation: EmulationConfig
    recovery: RecoveryConfig
    timing: TimingConfig
    act: Terms
    device: DeviceConfig
    data: DataConfig
    initial_weights: InitialWeightsConfig

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> Self:
        """Collects our settings from parsed flags.

        Raises:
            UserError: a value that its dataclass refuses.
        """
        built: dict[str, Any] = {
            name: from_namespace(namespace, config, prefix=prefix)
            for name, (config, prefix) in GROUPS.items()
        }
        return cls(**built)


GROUPS: dict[str, tuple[type, str]] = {
    "resilience": (ResilienceConfig, ""),
    "executor": (ExecutorConfig, "resilience-"),
    "checkpoint": (CheckpointSafetyConfig, "resilience-"),
    "faults": (FaultsConfig, "resilience-"),
    "emulation": (EmulationConfig, "resilience-"),
    "recovery": (RecoveryConfig, "resilience-"),
    "timing": (TimingConfig, "resilience-"),
    "act": (Terms, "resilience-act-"),
    "device": (DeviceConfig, ""),
    "data": (DataConfig, ""),
    "initial_weights": (InitialWeightsConfig, ""),
}


def add_our_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds every flag of ours to Megatron's parser (its ``extra_args_provider``)."""
    for config, prefix in GROUPS.values():
        add_flags(parser, config, prefix=prefix)
    return parser
