"""Train, validation and test sets, as Megatron's arguments describe them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.training import get_tokenizer
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.utils import get_blend_and_blend_per_split

from megatron.resilience.data.packed_dataset import PackedDataset
from megatron.resilience.upstream.arguments import current_args
from megatron.resilience.upstream.batch import reads_data
from megatron.resilience.upstream.rng import RngKeeper
from megatron.resilience.upstream.stream import Stream


class DatasetProvider:
    """Builds the three sets; called by ``pretrain``."""

    is_distributed = True
    """Tells upstream to call the provider on every rank; the builder decides who reads."""

    def __init__(
        self, *, packed: bool, everywhere: bool, rng: RngKeeper, by_number: bool = False
    ) -> None:
        """Prepares the provider.

        Args:
            packed: Whole documents packed, instead of upstream's running text.
            everywhere: Build the sets on every rank, so that any rank can fetch any sample;
                otherwise only where upstream's data loaders read.
            rng: Remembers the random state before anything is built.
            by_number: Give streams whose micro-batches are fetched by number, for an executor.
        """
        self._packed = packed
        self._everywhere = everywhere
        self._rng = rng
        self._by_number = by_number
        self.train: Any = None
        """The training set of this rank, once built; None where it is not."""

    def __call__(
        self, train_valid_test_num_samples: list[int], vp_stage: int | None = None
    ) -> list[Any]:
        self._rng.remember()
        args = current_args()
        sets: list[Any] = BlendedMegatronDatasetBuilder(
            self._kind(args),
            train_valid_test_num_samples,
            lambda: self._everywhere or reads_data(vp_stage),
            dataset_config(args),
        ).build()
        self.train = sets[0]
        return _streams(sets, args) if self._by_number else sets

    def _kind(self, args: argparse.Namespace) -> type:
        if args.mock_data:
            return MockGPTDataset
        if args.fim_data:
            return GPTFIMDataset
        return PackedDataset if self._packed else GPTDataset


def _streams(sets: list[Any], args: argparse.Namespace) -> list[Any]:
    """Train, validation and test sets as streams, each behind what was consumed of it."""
    sizes = (args.micro_batch_size, args.eval_micro_batch_size, args.eval_micro_batch_size)
    consumed: tuple[Callable[[], int], ...] = (
        lambda: int(args.consumed_train_samples),
        lambda: int(args.consumed_valid_samples),
        lambda: 0,
    )
    return [
        None if one is None else Stream(one, size, start)
        for one, size, start in zip(sets, sizes, consumed, strict=True)
    ]


def prefixes(args: argparse.Namespace) -> list[str]:
    """Path prefixes of every dataset that the arguments name."""
    blend, per_split = get_blend_and_blend_per_split(args)
    blends = [blend, *(per_split or [])]
    return sorted({prefix for one in blends if one is not None for prefix in one[0]})


def dataset_config(args: argparse.Namespace) -> GPTDatasetConfig:
    """Translates arguments into upstream's dataset config."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    per_dataset = args.per_dataset_sequences_path
    settings: dict[str, Any] = {
        "random_seed": args.seed,
        "sequence_length": args.seq_length,
        "blend": blend,
        "blend_per_split": blend_per_split,
        "tokenizer": get_tokenizer(),
        "path_to_cache": args.data_cache_path,
        "create_attention_mask": args.create_attention_mask_in_dataloader,
        "fast_cache_load": args.dataloader_fast_cache_load,
        "defer_npy_index_mmap": args.dataloader_defer_npy_index_mmap,
        "sequences_per_dataset": json.loads(Path(per_dataset).read_text()) if per_dataset else None,
        "inter_document_masking": args.dataloader_inter_document_masking,
        "context_parallel_size": args.context_parallel_size,
        **{name: getattr(args, name) for name in _SAME_NAME},
    }
    if args.fim_data:
        return GPTFIMDatasetConfig(**settings, **_fim_settings(args))
    return GPTDatasetConfig(**settings)


_SAME_NAME = (
    "split",
    "multiple_validation_sets",
    "full_validation",
    "num_dataset_builder_threads",
    "mmap_bin_files",
    "reset_position_ids",
    "reset_attention_mask",
    "eod_mask_loss",
    "object_storage_cache_path",
    "mid_level_dataset_surplus",
    "allow_ambiguous_pad_tokens",
)


def _fim_settings(args: argparse.Namespace) -> dict[str, Any]:
    words = ("prefix", "middle", "suffix", "pad", "eod")
    return {
        "fim_rate": args.fim_rate,
        "fim_spm_rate": args.fim_spm_rate,
        "fim_extra_tokens": {word: getattr(args, f"fim_{word}_token") for word in words},
        "fim_split_sample": args.fim_split_sample,
        "fim_fragment_rate": args.fim_fragment_rate,
        "fim_no_prefix": args.fim_no_prefix,
    }
