"""Settings of the data path."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Packed sequences."""

    packed_sequences: bool = False
    """Packs whole documents to the sequence length (best fit); attention, positions and loss stay
    inside a document."""
