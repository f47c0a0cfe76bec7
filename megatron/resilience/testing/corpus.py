"""A small real corpus for tests: top-level definitions of Python's own standard library.

Functions and classes are short and of strongly varying length, so that a sequence of a few hundred
bytes packs several of them.
"""

from __future__ import annotations

import ast
import random
import sysconfig
from pathlib import Path

import numpy as np
import torch

END_OF_DOCUMENT = 256
"""Id that ends a document; the ids below are bytes."""


def definitions(module: Path) -> list[bytes]:
    """Source text of each top-level function and class of a module."""
    text = module.read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = [node for node in ast.parse(text).body if isinstance(node, kinds)]
    return ["".join(lines[node.lineno - 1 : node.end_lineno]).encode() for node in nodes]


def write_corpus(prefix: Path, *, seed: int = 0, documents: int = 400) -> Path:
    """Writes ``prefix.bin`` and ``prefix.idx`` with definitions drawn by ``seed``.

    Returns:
        ``prefix``, what ``--data-path`` takes.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    library = Path(sysconfig.get_paths()["stdlib"])
    texts = [text for path in sorted(library.glob("*.py")) for text in definitions(path)]
    chosen = random.Random(seed).sample(texts, documents)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for text in chosen:
        builder.add_item(torch.tensor([*text, END_OF_DOCUMENT]))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix
