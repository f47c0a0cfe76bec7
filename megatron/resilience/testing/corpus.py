"""A small real corpus for tests: top-level definitions of Python's own standard library.

Functions and classes are short and of strongly varying length, so that a sequence of a few hundred
bytes packs several of them.
"""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

import numpy as np

from megatron.resilience.data.byte_tokenizer import BYTE_EOD
from megatron.resilience.data.preprocess.python_source import split_source


def write_corpus(
    prefix: Path, *, seed: int = 0, documents: int = 400, longest_bytes: int = 1000
) -> Path:
    """Writes ``prefix.bin`` and ``prefix.idx`` with definitions drawn by ``seed``.

    Returns:
        ``prefix``, what ``--data-path`` takes.
    """
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    library = Path(sysconfig.get_path("stdlib"))
    modules = sorted(library.glob("*.py"))
    found = (text.encode() for path in modules for _, text in split_source(path.read_text("utf-8")))
    short = [text for text in found if len(text) <= longest_bytes and not text.isspace()]
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in random.Random(seed).sample(short, documents):
        builder.add_item(torch.tensor([*text, BYTE_EOD]))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix
