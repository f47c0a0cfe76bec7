"""Seconds of one layer, ``alpha * tokens + beta * sum(l ** 2)``: computed from rates or measured.

``alpha`` holds everything that grows with the tokens: matrices, norms, and the collectives inside a
tensor-parallel group, whose latency counts a token's share of a full micro-batch. ``beta`` is
attention's over segments of lengths ``l``.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from resihp_ext.cost.link import Link
from resihp_ext.cost.model_shape import ModelShape


class Part(StrEnum):
    """What of a micro-batch's work."""

    FORWARD = "forward"
    INPUT = "input"
    """Backward: the gradient of the input."""
    WEIGHT = "weight"
    """Backward: the gradients of the weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """``alpha_s * tokens + beta_s * squared`` seconds."""

    alpha_s: float
    """Seconds a token."""
    beta_s: float = 0.0
    """Seconds for each unit of the sum of squared segment lengths."""

    def seconds(self, tokens: int, squared: int) -> float:
        """Time of a micro-batch."""
        return self.alpha_s * tokens + self.beta_s * squared


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """The ranks that share a layer."""

    tp: int
    link: Link
    sequence_parallel: bool = False


class LayerCost(Protocol):
    """Where coefficients come from."""

    def layer(self, shape: ModelShape, group: TensorGroup, part: Part) -> Coefficients:
        """Of one layer, on each rank of its group."""

    def head_s(self, shape: ModelShape, group: TensorGroup, part: Part) -> float:
        """Of output layer and loss; seconds a token."""

    def embedding_s(self, shape: ModelShape, group: TensorGroup, part: Part) -> float:
        """Of the lookup; seconds a token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """A device by its rates: what it reaches, not what its maker promises."""

    matrix_flops: float
    """FLOP/s in matrix products."""
    attention_flops: float
    """FLOP/s in fused attention, forward; a causal mask halves the work."""
    memory_bytes_per_s: float
    element_bytes: int = 2
    backward_attention: float = 2.5
    """Attention's backward over its forward: five products instead of two (Dao 2023)."""

    def layer(self, shape: ModelShape, group: TensorGroup, part: Part) -> Coefficients:
        """Products by FLOPs, everything else by bytes."""
        products_s = 2 * shape.layer_matrix_parameters / group.tp / self.matrix_flops
        if part is Part.WEIGHT:
            return Coefficients(alpha_s=products_s)
        # Of one token, read and written: two norms and two additions over the whole width, rotary
        # embedding and activation function over the rank's share.
        whole = 10 * shape.hidden_size / (group.tp if group.sequence_parallel else 1)
        share = (2 * shape.qkv_size + shape.fc1_size + shape.ffn_hidden_size) / group.tp
        passes_s = (whole + share) * self.element_bytes / self.memory_bytes_per_s
        # Two all-reduces a layer and direction (Shoeybi et al. 2019, arXiv 1909.08053); sequence
        # parallelism moves the same bytes by reduce-scatters and all-gathers.
        boundary_bytes = shape.tokens * shape.hidden_size * self.element_bytes
        group_s = 2 * group.link.all_reduce_s(boundary_bytes, group.tp) / shape.tokens
        beta_s = 2 * shape.hidden_size / group.tp / self.attention_flops
        if part is Part.INPUT:
            beta_s *= self.backward_attention
        return Coefficients(alpha_s=products_s + passes_s + group_s, beta_s=beta_s)

    def head_s(self, shape: ModelShape, group: TensorGroup, part: Part) -> float:
        """One product, and the loss: passes over the logits in 32 bits."""
        product_s = 2 * shape.embedding_parameters / group.tp / self.matrix_flops
        passes = {Part.FORWARD: 6, Part.INPUT: 3, Part.WEIGHT: 0}[part]
        loss_s = passes * 4 * shape.vocab_size / group.tp / self.memory_bytes_per_s
        return product_s + loss_s

    def embedding_s(self, shape: ModelShape, group: TensorGroup, part: Part) -> float:
        """Forward reads and writes a row a token, backward adds one up in 32 bits."""
        row_bytes = {Part.FORWARD: 2 * self.element_bytes, Part.INPUT: 0, Part.WEIGHT: 12}[part]
        return row_bytes * shape.hidden_size / self.memory_bytes_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLayer:
    """What was measured for one TP degree, in seconds."""

    forward: Coefficients
    backward: Coefficients
    """Both parts together."""
    head_forward_s: float
    """A token, output layer and loss."""
    head_backward_s: float
    embedding_s: float
    """A token, forward; backward is taken for the same."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Coefficients measured for one shape; others are scaled by their FLOPs."""

    shape: ModelShape
    layers: Mapping[int, MeasuredLayer]
    """By TP degree."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("no TP degree was measured")

    def layer(self, shape: ModelShape, group: TensorGroup, part: Part) -> Coefficients:
        """Half of backward's linear part is the weights', all of its quadratic part the input's."""
        degree, found = self._nearest(group.tp)
        reference = self.shape
        linear = shape.layer_matrix_parameters / reference.layer_matrix_parameters
        quadratic = shape.hidden_size / reference.hidden_size
        if part is Part.FORWARD:
            alpha_s, beta_s = found.forward.alpha_s, found.forward.beta_s
        else:
            alpha_s = found.backward.alpha_s / 2
            beta_s = found.backward.beta_s if part is Part.INPUT else 0.0
        share = degree / group.tp
        return Coefficients(alpha_s=alpha_s * linear * share, beta_s=beta_s * quadratic * share)

    def head_s(self, shape: ModelShape, group: TensorGroup, part: Part) -> float:
        """Half of backward for each of its parts."""
        degree, found = self._nearest(group.tp)
        scale = shape.embedding_parameters / self.shape.embedding_parameters * degree / group.tp
        token_s = found.head_forward_s if part is Part.FORWARD else found.head_backward_s / 2
        return token_s * scale

    def embedding_s(self, shape: ModelShape, group: TensorGroup, part: Part) -> float:
        """Forward as measured, as much for the weights, nothing for the input."""
        found = self._nearest(group.tp)[1]
        scale = shape.hidden_size / self.shape.hidden_size
        return 0.0 if part is Part.INPUT else found.embedding_s * scale

    def _nearest(self, tp: int) -> tuple[int, MeasuredLayer]:
        """The largest measured degree that is not above ``tp``, else the smallest."""
        below = [degree for degree in self.layers if degree <= tp]
        degree = max(below) if below else min(self.layers)
        return degree, self.layers[degree]
