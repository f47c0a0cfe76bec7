"""What is emulated: a model, its devices, and how fast time passes. A YAML file:

    model: llama2-7b
    hardware: a100
    seq_length: 8192
    time_scale: 0.5
    noise: 0.02
    speed: {3: 0.5}

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import msgspec
import yaml
from msgspec import Meta

from resihp_ext.cost.cost_model import CostModel, preset
from resihp_ext.cost.model_shape import MODELS, ModelShape
from resihp_ext.errors import UserError

Factor = Annotated[float, Meta(gt=0, le=1)]


class _File(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    hardware: str
    time_scale: Annotated[float, Meta(gt=0, le=10_000)]
    layers: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    seq_length: Annotated[int, Meta(ge=1, le=10_000_000)] | None = None
    noise: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0)] = 1
    speed: dict[int, Factor] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """What is emulated."""

    shape: ModelShape
    cost: CostModel
    time_scale: float
    """Seconds that pass for each second of the large model."""
    noise: float = 0.0
    """Standard deviation of the logarithm of every time."""
    seed: int = 1
    speed: Mapping[int, float] = field(default_factory=dict)
    """Of ranks whose device is slow from the beginning: the part of the speed that it has."""


def read_scene(path: str | Path) -> Scene:
    """Reads and checks a file.

    Raises:
        UserError: names the file and what is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    return scene_from_yaml(text, path)


def scene_from_yaml(text: str, path: str | Path) -> Scene:
    """Reads and checks a scene.

    Args:
        path: Where the text comes from, for messages.

    Raises:
        UserError: names the file and what is wrong.
    """
    try:
        found = msgspec.convert(yaml.safe_load(text), type=_File)
    except (yaml.YAMLError, ValueError, msgspec.ValidationError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())}") from error
    if found.model not in MODELS:
        raise UserError(
            f"{path}: model {found.model!r} is unknown; choose one of {', '.join(MODELS)}"
        )
    try:
        cost = preset(found.hardware)
    except UserError as error:
        raise UserError(f"{path}: hardware: {error}") from None
    base = MODELS[found.model]
    return Scene(
        shape=replace(
            base,
            num_layers=found.layers or base.num_layers,
            seq_length=found.seq_length or base.seq_length,
        ),
        cost=cost,
        time_scale=found.time_scale,
        noise=found.noise,
        seed=found.seed,
        speed=found.speed,
    )
