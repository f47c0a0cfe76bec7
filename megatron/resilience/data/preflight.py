"""What can be said about the data before anything is started."""

from __future__ import annotations

import argparse
import struct
from os import SEEK_END
from pathlib import Path

from megatron.resilience.data.config import DataConfig
from resihp_ext.errors import UserError

_INDEX_MAGIC = b"MMIDIDX\x00\x00"
_INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, type of a token, sequences, documents. Then, for each sequence, its length
(int32), and, for each, where it starts in the data (int64, bytes)."""


def check_packing(args: argparse.Namespace, config: DataConfig) -> None:
    """Refuses what cannot be packed yet, and tells upstream that samples carry boundaries.

    Raises:
        UserError: ``--packed-sequences`` beside a flag that it cannot be combined with.
    """
    if args.sft:
        raise UserError("--sft: fine-tuning data is not supported by this entry point")
    if not config.packed_sequences:
        return
    local = args.transformer_impl == "local"
    for flag, given in {
        "--mock-data": args.mock_data,
        "--fim-data": args.fim_data,
        "--context-parallel-size": args.context_parallel_size > 1,
        "--reset-attention-mask": args.reset_attention_mask,
        "--mtp-num-layers": args.mtp_num_layers is not None,
        "--multi-latent-attention": args.multi_latent_attention,
        "--spec": args.spec is not None,
        "--window-size": local and args.window_size is not None,
        "--softmax-type": local and args.softmax_type != "vanilla",
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
        UserError: one is missing, empty, cut short, or not what it should be.
    """
    index, data = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    try:
        promised = _promised_bytes(index)
        with data.open("rb") as file:
            size = file.seek(0, SEEK_END)
        if size == 0:
            raise ValueError(f"{data} is empty")
        if size < promised:
            raise ValueError(f"{data} has {size} of the {promised} bytes that {index} lists")
    except OSError as error:
        raise UserError(
            f"--data-path {prefix}: {error.filename}: {error.strerror}; the prefix goes without "
            ".bin and .idx, and tools/preprocess_data.py makes both"
        ) from error
    except ValueError as error:
        raise UserError(f"--data-path {prefix}: {error}; make it anew") from error


def _promised_bytes(index: Path) -> int:
    """How much data an index speaks of: where its last sequence ends.

    Raises:
        ValueError: what is wrong with the index.
    """
    from megatron.core.datasets.indexed_dataset import DType

    with index.open("rb") as file:
        head = file.read(_INDEX_HEADER.size)
        if not head.startswith(_INDEX_MAGIC):
            raise ValueError(f"{index} is not a Megatron index")
        size = file.seek(0, SEEK_END)
        _, _, code, sequences, documents = _INDEX_HEADER.unpack(head.ljust(_INDEX_HEADER.size))
        starts = _INDEX_HEADER.size + 4 * sequences
        if size < starts + 8 * (sequences + documents):
            raise ValueError(f"{index} is cut short")
        if code not in DType:
            raise ValueError(f"{index} has tokens of an unknown type ({code})")
        if sequences == 0:
            raise ValueError(f"{index} lists no documents")
        file.seek(starts - 4)
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(starts + 8 * (sequences - 1))
        (start,) = struct.unpack("<q", file.read(8))
    return int(start + length * DType.size(code))
