"""A Megatron dataset whose samples are whole documents packed to the sequence length.

A document of ``n`` tokens gives ``n - 1`` training positions: position ``i`` sees token ``i`` and
predicts token ``i + 1`` of the same document, so no label crosses a boundary and nothing has to be
thrown away. Samples carry ``cu_seqlens`` in the form that upstream's own batch code expects, so the
rest of Megatron treats them like its ``--dataloader-inter-document-masking``.

The content of sample ``i`` depends on the data, the seed and the sequence length; never on who
asks.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.core.utils import log_single_rank

from resihp_ext.errors import UserError
from resihp_ext.packing import Packing, pack_best_fit, segment_bounds

logger = logging.getLogger(__name__)

_ARRAYS = ("documents", "offsets", "lengths", "starts")
_CACHE_VERSION = 1
"""To be raised whenever the same lengths are packed differently than before."""


class PackedDataset(MegatronDataset):
    """Packed samples over the documents ``indices`` of an indexed dataset."""

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str | None,
        indices: np.ndarray,
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.packing = self._packing()
        if self.packing.sequences == 0:
            raise UserError(
                f"{dataset_path}: the {index_split.name} split has no document of two tokens or "
                "more; give more data or another --split"
            )
        self._length = num_samples or self.packing.sequences
        log_single_rank(
            logger,
            logging.INFO,
            f"packed {len(indices)} documents of {dataset_path} ({index_split.name}) into "
            f"{self.packing.sequences} sequences of {self.packing.capacity} tokens, fill ratio "
            f"{self.packing.fill_ratio:.4f}",
        )

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        return GPTDataset.numel_low_level_dataset(low_level_dataset)

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        return GPTDataset.build_low_level_dataset(dataset_path, config)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        """Returns sample ``idx``; all tensors have the sequence length, ``cu_seqlens`` one more.

        ``idx`` None is Megatron's filler for incomplete batches: a sample without loss.

        Raises:
            IndexError: past the end of the data set.
        """
        if idx is not None and not 0 <= idx < self._length:
            raise IndexError(f"sample {idx} of {self._length}")
        capacity = self.config.sequence_length
        tokens = np.full(capacity, self._filler, dtype=np.int64)
        labels = np.full(capacity, self._filler, dtype=np.int64)
        positions = np.zeros(capacity, dtype=np.int64)
        edges = [0]
        for document, offset, start, stop in segment_bounds(self.packing, self._sequence(idx or 0)):
            text = self.dataset.get(int(self.indices[document]), offset, stop - start + 1)
            tokens[start:stop], labels[start:stop] = text[:-1], text[1:]
            positions[start:stop] = np.arange(stop - start)
            edges.append(stop)
        filled = edges[-1]
        if filled < capacity:
            # Padding is a segment of its own: it must see no document and no document must see it.
            positions[filled:] = np.arange(capacity - filled)
            edges.append(capacity)
        loss_mask = torch.zeros(capacity)
        if idx is not None:
            loss_mask[:filled] = 1.0
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": loss_mask,
            "position_ids": torch.from_numpy(positions),
            "cu_seqlens": _padded(edges, capacity),
            "max_seqlen": torch.tensor(max(np.diff(edges)), dtype=torch.int32),
        }

    @property
    def _filler(self) -> int:
        return int(self.config.tokenizer.eod)

    def _sequence(self, idx: int) -> int:
        """The packed sequence behind sample ``idx``: every epoch visits all, in its own order."""
        epoch, place = divmod(idx, self.packing.sequences)
        return int(self._epoch_order(epoch)[place])

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if getattr(self, "_cached_epoch", None) != epoch:
            random = np.random.Generator(np.random.Philox([self.config.random_seed, epoch]))
            self._cached_order = random.permutation(self.packing.sequences)
            self._cached_epoch = epoch
        return self._cached_order

    def _packing(self) -> Packing:
        """Loads the packing from the cache beside the data, or computes and stores it."""
        capacity = self.config.sequence_length
        lengths = np.asarray(self.dataset.sequence_lengths)[self.indices].astype(np.int64)
        positions = np.maximum(lengths - 1, 0)
        path = self._cache_path(positions)
        packing = None if path is None else _load(path, capacity)
        if packing is None:
            packing = pack_best_fit(positions, capacity)
            if path is not None:
                _store(path, packing)
        return packing

    def _cache_path(self, positions: np.ndarray) -> Path | None:
        if self.dataset_path is None:
            return None
        folder = self.config.path_to_cache or Path(self.dataset_path).parent / "cache" / "packed"
        # A packing follows from the lengths alone. Sizes and times of files would not tell a
        # dataset from one rebuilt or restored over it.
        key = hashlib.blake2b(positions.tobytes(), digest_size=12)
        key.update(f"v{_CACHE_VERSION}/{self.config.sequence_length}".encode())
        return Path(folder) / f"{key.hexdigest()}.npz"


def _padded(edges: list[int], capacity: int) -> torch.Tensor:
    """``edges`` filled up with ``capacity`` to a fixed length, so that samples can be stacked."""
    bounds = torch.full((capacity + 1,), capacity, dtype=torch.int32)
    bounds[: len(edges)] = torch.tensor(edges, dtype=torch.int32)
    return bounds


def _load(path: Path, capacity: int) -> Packing | None:
    """Reads a cached packing; None where there is none that can be read."""
    try:
        with np.load(path) as arrays:
            return Packing(capacity=capacity, **{name: arrays[name] for name in _ARRAYS})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, BadZipFile) as error:
        logger.warning("cached packing %s is not readable: %s; computed anew", path, error)
        return None


def _store(path: Path, packing: Packing) -> None:
    """Writes the cache under a temporary name first; a reader never sees half a file."""
    arrays: dict[str, Any] = {name: getattr(packing, name) for name in _ARRAYS}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            dir=path.parent, suffix=".tmp", delete_on_close=False
        ) as file:
            np.savez(file, **arrays)
            file.close()
            os.replace(file.name, path)
    except OSError as error:
        logger.warning(
            "packing is not cached in %s: %s; it is computed at every start", path, error
        )
