"""A tokenizer that needs no download: one id for each byte, one to end a document, one to pad.

Promise: ids 0 to 255 are bytes, 256 ends a document, 257 pads; nothing collides with a real byte
and nothing here imports torch.

Why it exists: upstream's ``ByteLevelTokenizer`` is out of reach of ``build_tokenizer`` (its library
is not among ``SUPPORTED_TOKENIZERS``, and ``--tokenizer-metadata`` reaches its constructor only
together with keywords that it refuses), and its end and pad ids default to the bytes 0 and 1.
Training needs none of this class: ids are all that it reads, so upstream's ``NullTokenizer`` with
:data:`BYTE_TRAINING_FLAGS` describes exactly this vocabulary.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

BYTE_VOCAB_SIZE = 258
BYTE_EOD = 256
BYTE_PAD = 257

BYTE_TRAINING_FLAGS = (
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    str(BYTE_VOCAB_SIZE),
    "--null-tokenizer-eod-id",
    str(BYTE_EOD),
    "--null-tokenizer-pad-id",
    str(BYTE_PAD),
)
"""The flags of ``pretrain_gpt.py`` that describe this vocabulary."""


class ByteTokenizer:
    """The surface that Megatron's datasets and generation expect of a tokenizer, over bytes."""

    vocab_size = BYTE_VOCAB_SIZE
    eod = BYTE_EOD
    eos = BYTE_EOD
    pad = BYTE_PAD
    pad_id = BYTE_PAD

    @property
    def unique_identifiers(self) -> OrderedDict[str, str]:
        """What names this tokenizer in the cache keys of Megatron's datasets."""
        return OrderedDict({"class": f"{type(self).__module__}.{type(self).__qualname__}"})

    def tokenize(self, text: str) -> list[int]:
        """Return the UTF-8 bytes of ``text`` as ids, without end of document.

        Raises:
            UnicodeEncodeError: ``text`` holds a lone surrogate, which UTF-8 cannot express.
        """
        return list(text.encode("utf-8"))

    def detokenize(self, ids: Iterable[int]) -> str:
        """Return the text of ``ids``; special ids are dropped, broken UTF-8 is marked U+FFFD."""
        return bytes(i for i in ids if 0 <= i < BYTE_EOD).decode("utf-8", errors="replace")


def byte_ids(data: bytes) -> np.ndarray:
    """Return the ids of UTF-8 ``data``: shape (len(data),), dtype uint16."""
    return np.frombuffer(data, dtype=np.uint8).astype(np.uint16)


def ids_to_bytes(ids: Sequence[int] | np.ndarray) -> bytes:
    """Return the bytes behind ``ids`` exactly, without the special ids."""
    array = np.asarray(ids)
    return array[array < BYTE_EOD].astype(np.uint8).tobytes()
