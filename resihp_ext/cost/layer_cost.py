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


class LayerCost(Protocol):
    """Where coefficients come from."""

    def layer(self, shape: ModelShape, tp: int, part: Part, link: Link) -> Coefficients:
        """Of one layer, on each of ``tp`` ranks joined by ``link``."""

    def head(self, shape: ModelShape, tp: int, part: Part) -> Coefficients:
        """Of output layer and loss."""

    def embedding(self, shape: ModelShape, tp: int, part: Part) -> Coefficients:
        """Of the lookup."""


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

    def layer(self, shape: ModelShape, tp: int, part: Part, link: Link) -> Coefficients:
        """Products by FLOPs, everything else by bytes."""
        products_s = 2 * shape.layer_matrix_parameters / tp / self.matrix_flops
        if part is Part.WEIGHT:
            return Coefficients(alpha_s=products_s)
        # Of one token, read and written: two norms and two additions on the whole width of every
        # rank, rotary embedding and activation function on the rank's share.
        whole = 10 * shape.hidden_size
        share = (2 * shape.qkv_size + shape.fc1_size + shape.ffn_hidden_size) / tp
        other_s = (whole + share) * self.element_bytes / self.memory_bytes_per_s
        # Two all-reduces a layer and direction (Shoeybi et al. 2019); with sequence parallelism the
        # same bytes as reduce-scatters and all-gathers.
        boundary_bytes = shape.tokens * shape.hidden_size * self.element_bytes
        group_s = 2 * link.all_reduce_s(boundary_bytes, tp) / shape.tokens
        beta_s = 2 * shape.hidden_size / tp / self.attention_flops
        if part is Part.INPUT:
            beta_s *= self.backward_attention
        return Coefficients(alpha_s=products_s + other_s + group_s, beta_s=beta_s)

    def head(self, shape: ModelShape, tp: int, part: Part) -> Coefficients:
        """One product, and the loss: some passes over the logits in 32 bits."""
        alpha_s = 2 * shape.embedding_parameters / tp / self.matrix_flops
        passes = {Part.FORWARD: 6, Part.INPUT: 3, Part.WEIGHT: 0}[part]
        alpha_s += passes * 4 * shape.vocab_size / tp / self.memory_bytes_per_s
        return Coefficients(alpha_s=alpha_s)

    def embedding(self, shape: ModelShape, tp: int, part: Part) -> Coefficients:
        """Reads and writes a row a token; backward adds rows up in 32 bits."""
        row_bytes = {Part.FORWARD: 2 * self.element_bytes, Part.INPUT: 0, Part.WEIGHT: 12}[part]
        return Coefficients(alpha_s=row_bytes * shape.hidden_size / self.memory_bytes_per_s)


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

    def layer(self, shape: ModelShape, tp: int, part: Part, link: Link) -> Coefficients:
        """Half of the linear part of backward is the weights', all of the quadratic the input's."""
        degree, found = self._nearest(tp)
        linear = self._scale(
            shape.layer_matrix_parameters, self.shape.layer_matrix_parameters, degree, tp
        )
        quadratic = self._scale(shape.hidden_size, self.shape.hidden_size, degree, tp)
        if part is Part.FORWARD:
            alpha_s, beta_s = found.forward.alpha_s, found.forward.beta_s
        else:
            alpha_s = found.backward.alpha_s / 2
            beta_s = found.backward.beta_s if part is Part.INPUT else 0.0
        return Coefficients(alpha_s=alpha_s * linear, beta_s=beta_s * quadratic)

    def head(self, shape: ModelShape, tp: int, part: Part) -> Coefficients:
        """Half of backward for each of its parts."""
        degree, found = self._nearest(tp)
        scale = self._scale(shape.embedding_parameters, self.shape.embedding_parameters, degree, tp)
        whole_s = found.head_forward_s if part is Part.FORWARD else found.head_backward_s / 2
        return Coefficients(alpha_s=whole_s * scale)

    def embedding(self, shape: ModelShape, tp: int, part: Part) -> Coefficients:
        """Forward as measured, as much for the weights, nothing for the input."""
        found = self._nearest(tp)[1]
        scale = shape.hidden_size / self.shape.hidden_size
        return Coefficients(alpha_s=0.0 if part is Part.INPUT else found.embedding_s * scale)

    def _nearest(self, tp: int) -> tuple[int, MeasuredLayer]:
        """The largest measured degree that is not above ``tp``, else the smallest."""
        below = [degree for degree in self.layers if degree <= tp]
        degree = max(below) if below else min(self.layers)
        return degree, self.layers[degree]

    @staticmethod
    def _scale(size: int, measured: int, degree: int, tp: int) -> float:
        return size / measured * (degree / tp)
