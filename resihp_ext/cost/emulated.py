"""What the layers of a small model cost where each stands for some of a large one.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

from resihp_ext.cost.layer_cost import Coefficients, LayerCost, Part, TensorGroup
from resihp_ext.cost.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, slots=True)
class Emulated:
    """Coefficients of a large model, for the tokens and layers of the one that is asked about."""

    large: ModelShape
    layers: LayerCost
    """Of the device."""

    def layer(self, shape: ModelShape, group: TensorGroup, part: Part) -> Coefficients:
        """As many layers of the large model as stand behind one."""
        each = self.large.num_layers / shape.num_layers
        tokens = self.large.seq_length / shape.seq_length
        found = self.layers.layer(self.large, group, part)
        return Coefficients(
            alpha_s=found.alpha_s * each * tokens, beta_s=found.beta_s * each * tokens**2
        )

    def head_s(self, shape: ModelShape, group: TensorGroup, part: Part) -> float:
        """Of output layer and loss; seconds a token."""
        tokens = self.large.seq_length / shape.seq_length
        return self.layers.head_s(self.large, group, part) * tokens

    def embedding_s(self, shape: ModelShape, group: TensorGroup, part: Part) -> float:
        """Of the lookup; seconds a token."""
        tokens = self.large.seq_length / shape.seq_length
        return self.layers.embedding_s(self.large, group, part) * tokens
