"""Torch's norms, with sequence parallelism: what Megatron's ``local`` layers lack on a CPU.

Under sequence parallelism each tensor-parallel rank normalises its own part of the sequence, so the
gradients of a norm's parameters are partial sums; Megatron adds them up for every parameter that
carries ``sequence_parallel = True``. Upstream's wrapper around torch's norms refuses the flag only
because it does not set that attribute.
"""

from __future__ import annotations

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from resihp_ext.errors import UserError

_KINDS = {"RMSNorm": torch.nn.RMSNorm, "LayerNorm": torch.nn.LayerNorm}


class SequenceParallelNorm:
    """Builds ``torch.nn.RMSNorm`` or ``LayerNorm`` over the last dimension, as the config says.

    A class with ``__new__`` and not a function: Megatron calls classes to build modules and takes
    functions for modules already built.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5
    ) -> torch.nn.Module:
        """Builds the norm.

        Args:
            hidden_size: Size of the normalised last dimension.

        Raises:
            UserError: a norm that torch does not have, or ``--apply-layernorm-1p``.
        """
        kind = _KINDS.get(config.normalization)
        if kind is None or config.layernorm_zero_centered_gamma:
            raise UserError(
                f"--normalization {config.normalization}"
                f"{' --apply-layernorm-1p' if config.layernorm_zero_centered_gamma else ''}: "
                f"only {' and '.join(_KINDS)} exist without Transformer Engine"
            )
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
