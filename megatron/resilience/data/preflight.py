"""What can be said about the data before anything is started."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron.resilience.data.config import DataConfig
from resihp_ext.errors import UserError

_INDEX_MAGIC = b"MMIDIDX\x00\x00"


def check_packing(args: argparse.Namespace, config: DataConfig) -> None:
    """Refuses what cannot be packed yet, and tells upstream that samples carry boundaries.

    Raises:
        UserError: ``--packed-sequences`` beside a flag that it cannot be combined with.
    """
    if args.sft:
        raise UserError("--sft: fine-tuning data is not supported by this entry point")
    if not config.packed_sequences:
        return
    for flag, given in {
        "--mock-data": args.mock_data,
        "--fim-data": args.fim_data,
        "--context-parallel-size": args.context_parallel_size > 1,
        "--reset-attention-mask": args.reset_attention_mask,
        "--mtp-num-layers": args.mtp_num_layers is not None,
        "--multi-latent-attention": args.multi_latent_attention,
        "--spec": args.spec is not None,
    }.items():
        if given:
            raise UserError(f"--packed-sequences cannot be combined with {flag}; drop one of them")
    args.dataloader_inter_document_masking = True
    args.create_attention_mask_in_dataloader = False


def check_data(args: argparse.Namespace) -> None:
    """Checks that every dataset the arguments name is there.

    Raises:
        UserError: no data was named, or a file is missing or not an index of a dataset.
    """
    from megatron.resilience.upstream.datasets import prefixes

    named = prefixes(args)
    if not named and not args.mock_data:
        raise UserError(
            "no data: give --data-path PREFIX (make one with tools/preprocess_data.py), "
            "or --mock-data"
        )
    for prefix in named:
        if "://" not in prefix:
            check_prefix(prefix)


def check_prefix(prefix: str) -> None:
    """Checks ``PREFIX.bin`` and ``PREFIX.idx`` of one dataset.

    Raises:
        UserError: one is missing, empty, or not what it should be.
    """
    for path in (Path(f"{prefix}.idx"), Path(f"{prefix}.bin")):
        try:
            with path.open("rb") as file:
                head = file.read(len(_INDEX_MAGIC))
        except OSError as error:
            raise UserError(
                f"--data-path {prefix}: {path}: {error.strerror}; the prefix goes without .bin and "
                ".idx, and tools/preprocess_data.py makes both"
            ) from error
        if path.suffix == ".idx" and head != _INDEX_MAGIC:
            raise UserError(f"--data-path {prefix}: {path} is not a Megatron index; make it anew")
        if path.suffix == ".bin" and not head:
            raise UserError(f"--data-path {prefix}: {path} is empty; make it anew")
