"""The file that ``resihp profile`` writes: what a layer and a message take on one machine.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from resihp_ext.cost.layer_cost import Coefficients, MeasuredLayer
from resihp_ext.cost.link import Link
from resihp_ext.cost.model_shape import ModelShape
from resihp_ext.errors import UserError

FORMAT = "resihp-profile-1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measured figures; the units are those of :class:`resihp_ext.cost.cost_model.CostModel`."""

    device: str
    shape: ModelShape
    layers: Mapping[int, MeasuredLayer]
    """By TP degree."""
    inside: Link
    between: Link
    step_parameter_s: float
    element_bytes: int
    fixed_transition_s: float
    notes: Mapping[str, Any]
    """For people: errors of the fits, what was assumed rather than measured."""

    def to_json(self) -> str:
        """JSON with sorted keys, indented for people."""
        fields = {
            "format": FORMAT,
            "device": self.device,
            "model": asdict(self.shape),
            "layers": [{"tp": tp, **asdict(layer)} for tp, layer in sorted(self.layers.items())],
            "inside": asdict(self.inside),
            "between": asdict(self.between),
            "step_parameter_s": self.step_parameter_s,
            "element_bytes": self.element_bytes,
            "fixed_transition_s": self.fixed_transition_s,
            "notes": dict(self.notes),
        }
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"


def read_profile(path: str | Path) -> Profile:
    """Inverse of :meth:`Profile.to_json`.

    Raises:
        UserError: the file cannot be read, or is not a profile.
    """
    try:
        text = Path(path).read_text("utf-8")
    except OSError as error:
        raise UserError(f"profile {path}: {error.strerror}") from error
    except ValueError as error:
        raise _refusal(path, error) from error
    return parse_profile(text, path)


def parse_profile(text: str, path: str | Path) -> Profile:
    """As :func:`read_profile`, from what was read already.

    Raises:
        UserError: the text is not a profile; names ``path``.
    """
    try:
        fields = json.loads(text)
        if fields["format"] != FORMAT:
            raise ValueError(f"its format is {fields['format']!r}, not {FORMAT!r}")
        return _from_fields(fields)
    except (KeyError, TypeError, ValueError) as error:
        raise _refusal(path, error) from error


def _refusal(path: str | Path, error: Exception) -> UserError:
    return UserError(f"profile {path}: {error!r}; write it anew with resihp profile --out {path}")


def _from_fields(fields: Mapping[str, Any]) -> Profile:
    layers = {
        int(entry["tp"]): MeasuredLayer(
            forward=Coefficients(**entry["forward"]),
            backward=Coefficients(**entry["backward"]),
            head_forward_s=float(entry["head_forward_s"]),
            head_backward_s=float(entry["head_backward_s"]),
            embedding_s=float(entry["embedding_s"]),
        )
        for entry in fields["layers"]
    }
    if not layers:
        raise ValueError("no TP degree was measured")
    return Profile(
        device=str(fields["device"]),
        shape=ModelShape(**fields["model"]),
        layers=layers,
        inside=Link(**fields["inside"]),
        between=Link(**fields["between"]),
        step_parameter_s=float(fields["step_parameter_s"]),
        element_bytes=int(fields["element_bytes"]),
        fixed_transition_s=float(fields["fixed_transition_s"]),
        notes=dict(fields["notes"]),
    )
