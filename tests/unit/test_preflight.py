"""What is said about flags and data before anything is started."""

import argparse
import struct
from pathlib import Path

import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from megatron.resilience.data.config import DataConfig
from megatron.resilience.data.preflight import check_packing, check_prefix
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit


def write(prefix: Path, *lengths: int) -> Path:
    builder = IndexedDatasetBuilder(f"{prefix}.bin")
    for length in lengths:
        builder.add_item(torch.arange(length))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def refused(prefix: Path) -> str:
    with pytest.raises(UserError) as caught:
        check_prefix(str(prefix))
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"--data-path {prefix}: ")
    return line


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize("lengths", [[5], [3, 0, 7], [0, 4, 0]], ids=str)
def test_sound_data_passes(tmp_path, lengths):
    check_prefix(str(write(tmp_path / "d", *lengths)))


@pytest.mark.parametrize("ending", ["bin", "idx"])
def test_missing_file_is_named(tmp_path, ending):
    prefix = write(tmp_path / "d", 5)
    (tmp_path / f"d.{ending}").unlink()
    line = refused(prefix)
    assert f"{prefix}.{ending}: No such file" in line
    assert "tools/preprocess_data.py" in line


def test_prefix_given_with_its_ending(tmp_path):
    write(tmp_path / "d", 5)
    assert "goes without .bin" in refused(tmp_path / "d.bin")


def test_data_cut_short(tmp_path):
    prefix = write(tmp_path / "d", 5, 6)
    cut(tmp_path / "d.bin", 43)
    assert f"{prefix}.bin has 43 of the 44 bytes that {prefix}.idx lists" in refused(prefix)


def test_empty_data(tmp_path):
    prefix = write(tmp_path / "d", 5)
    cut(tmp_path / "d.bin", 0)
    assert f"{prefix}.bin is empty" in refused(prefix)


@pytest.mark.parametrize("size", [9, 20, 34, 50, -1])
def test_index_cut_short(tmp_path, size):
    prefix = write(tmp_path / "d", 5, 6)
    cut(tmp_path / "d.idx", size)
    assert f"{prefix}.idx is cut short" in refused(prefix)


@pytest.mark.parametrize("content", [b"", b"text", b"MMIDIDX\x00"])
def test_something_else_than_an_index(tmp_path, content):
    prefix = write(tmp_path / "d", 5)
    (tmp_path / "d.idx").write_bytes(content)
    assert f"{prefix}.idx is not a Megatron index" in refused(prefix)


def test_no_documents(tmp_path):
    prefix = write(tmp_path / "d")
    assert f"{prefix}.idx lists no documents" in refused(prefix)


def test_unknown_type_of_token(tmp_path):
    prefix = write(tmp_path / "d", 5)
    index = tmp_path / "d.idx"
    head = bytearray(index.read_bytes())
    struct.pack_into("<B", head, 17, 99)
    index.write_bytes(head)
    assert f"{prefix}.idx has tokens of an unknown type (99)" in refused(prefix)


def arguments(**changed: object) -> argparse.Namespace:
    plain: dict[str, object] = {
        "sft": False,
        "mock_data": False,
        "fim_data": False,
        "context_parallel_size": 1,
        "reset_attention_mask": False,
        "mtp_num_layers": None,
        "multi_latent_attention": False,
        "spec": None,
        "transformer_impl": "local",
        "window_size": None,
        "softmax_type": "vanilla",
        "dataloader_inter_document_masking": False,
        "create_attention_mask_in_dataloader": True,
    }
    return argparse.Namespace(**(plain | changed))


WRONG = {
    "--mock-data": {"mock_data": True},
    "--fim-data": {"fim_data": True},
    "--context-parallel-size": {"context_parallel_size": 2},
    "--reset-attention-mask": {"reset_attention_mask": True},
    "--mtp-num-layers": {"mtp_num_layers": 1},
    "--multi-latent-attention": {"multi_latent_attention": True},
    "--spec": {"spec": ["module", "name"]},
    "--window-size": {"window_size": (7, 0)},
    "--softmax-type": {"softmax_type": "off-by-one"},
}


@pytest.mark.parametrize("flag", WRONG)
def test_what_cannot_be_packed_is_refused_by_its_flag(flag):
    args = arguments(**WRONG[flag])
    with pytest.raises(UserError) as caught:
        check_packing(args, DataConfig(packed_sequences=True))
    assert str(caught.value).startswith(f"--packed-sequences cannot be combined with {flag};")
    assert not args.dataloader_inter_document_masking
    check_packing(args, DataConfig())


@pytest.mark.parametrize("flag", ["--window-size", "--softmax-type"])
def test_transformer_engine_knows_more_about_packed_attention(flag):
    args = arguments(transformer_impl="transformer_engine", **WRONG[flag])
    check_packing(args, DataConfig(packed_sequences=True))


def test_packing_tells_upstream_of_the_boundaries():
    args = arguments()
    check_packing(args, DataConfig(packed_sequences=True))
    assert args.dataloader_inter_document_masking
    assert not args.create_attention_mask_in_dataloader
    before = arguments()
    check_packing(before, DataConfig())
    assert before == arguments()


@pytest.mark.parametrize("packed", [True, False])
def test_fine_tuning_data_is_refused(packed):
    with pytest.raises(UserError, match=r"^--sft: "):
        check_packing(arguments(sft=True), DataConfig(packed_sequences=packed))
