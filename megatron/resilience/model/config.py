"""Settings of the model's starting point."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeightsConfig:
    """Initial weights."""

    initial_weights: Literal["logical", "upstream"] = "logical"
    """logical: the same weights for every layout, from (seed, tensor name, element); upstream:
    Megatron's own generators, whose numbers depend on the layout."""
