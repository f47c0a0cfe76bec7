"""Lengths of documents, and how they fill sequences: what makes healthy iterations vary.

Imports neither torch nor Megatron.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resihp_ext.detector.slots import Array

LOG_MEAN, LOG_DEVIATION = 6.8, 1.6
"""Of the natural logarithm of a document's tokens, as in files of public code: half of them have
less than 900 tokens, one in a hundred more than 37,000. An assumption, to be swept."""
LEAST_TOKENS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Documents:
    """A log-normal law; deviation 0 with a huge mean packs one document a sequence."""

    log_mean: float = LOG_MEAN
    log_deviation: float = LOG_DEVIATION

    def squared(self, sequences: int, tokens: int, rng: np.random.Generator) -> Array:
        """Sums of squared segment lengths of sequences that are filled with documents, the last of
        which is cut off.

        Returns:
            Shape ``(sequences,)``.
        """
        found = np.zeros(sequences)
        room = np.full(sequences, float(tokens))
        open_ = np.arange(sequences)
        while len(open_):
            drawn = rng.lognormal(self.log_mean, self.log_deviation, len(open_))
            length = np.minimum(np.floor(drawn) + LEAST_TOKENS, room[open_])
            found[open_] += length**2
            room[open_] -= length
            open_ = open_[room[open_] > 0]
        return found
