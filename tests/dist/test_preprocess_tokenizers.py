"""Tokenizers of upstream in the preprocessor, and its datasets in upstream's readers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from preprocessing import LIMIT_S, forked, jsonl, one_line, summary_of

from megatron.resilience.data.byte_tokenizer import BYTE_EOD, BYTE_TRAINING_FLAGS, ids_to_bytes
from megatron.resilience.data.preprocess.encoders import build_encoder, dtype_for, quiet_imports
from megatron.resilience.data.preprocess.sources import stdlib_root

with quiet_imports():
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.indexed_dataset import DType, IndexedDataset
    from megatron.core.datasets.utils import Split

pytestmark = pytest.mark.dist


def test_a_tokenizer_of_upstream_is_used_with_its_own_flags(tmp_path, out):
    import sentencepiece

    texts = Path(stdlib_root(), "argparse.py").read_text().split("\n\n")
    corpus = tmp_path / "a.jsonl"
    corpus.write_bytes(jsonl(texts))
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=str(tmp_path / "m"), vocab_size=500,
        minloglevel=2,
    )  # fmt: skip
    model = tmp_path / "m.model"
    flags = ("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", model)
    args = ("--input", corpus, "--output-prefix", out / "d", "--workers", 2, "--json", *flags)
    code, stdout, stderr = forked(tmp_path, *args)
    assert code == 0, stderr
    summary = summary_of(stdout)
    assert summary["vocab_size"] == 500
    assert summary["training_flags"] == list(map(str, flags))
    reference = sentencepiece.SentencePieceProcessor(model_file=str(model))
    dataset = IndexedDataset(str(out / "d"))
    kept = [t for t in texts if t.strip()]
    assert len(dataset) == len(kept)
    for index, text in enumerate(kept):
        assert dataset[index].tolist() == [*reference.encode(text), reference.eos_id()]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokenizer-type", "NoSuch"], ["--tokenizer-type", "NoSuch"]),
        (
            ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", "/no/m.model"],
            ["SentencePieceTokenizer", "/no/m.model"],
        ),
        (["--tokenizer-type", "NullTokenizer", "--vocab-sice", "9"], ["--vocab-sice"]),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_one_line(tmp_path, out, flags, words):
    code, _, stderr = forked(tmp_path, "--stdlib", "--output-prefix", out / "d", *flags)
    assert code == 2, stderr
    one_line(stderr, *words)
    assert not os.listdir(out)


def test_ids_outside_the_vocabulary_are_bad_documents(tmp_path, out):
    (tmp_path / "a.txt").write_text("1 2 9\n1 2 10\nthree\n")
    flags = ("--tokenizer-type", "NullTokenizer", "--vocab-size", 10)
    args = ("--input", tmp_path / "a.txt", "--format", "lines", "--output-prefix", out / "d")
    code, stdout, stderr = forked(tmp_path, *args, *flags, "--max-bad-fraction", 1, "--json")
    assert code == 0, stderr
    dataset = IndexedDataset(str(out / "d"))  # its arrays are views: they must not outlive it
    assert dataset[0].tolist() == [1, 2, 9, 9]
    assert summary_of(stdout)["bad"] == {"untokenizable": 2}


def test_the_byte_path_of_the_workers_loads_no_torch():
    code = (
        "import sys; import megatron.resilience.data.preprocess.run; "
        "sys.exit('torch' in sys.modules or 'megatron.core' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=LIMIT_S).returncode == 0


@pytest.mark.parametrize("vocab_size", [258, 32_000, 65_499, 65_500, 65_536, 200_000])
def test_the_token_type_is_the_one_upstream_chooses(vocab_size):
    assert dtype_for(vocab_size) is DType.optimal_dtype(vocab_size)


def test_upstreams_null_tokenizer_is_our_byte_vocabulary_in_training():
    encoder = build_encoder(BYTE_TRAINING_FLAGS[1], BYTE_TRAINING_FLAGS[2:])
    tokenizer = encoder._tokenizer
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (258, 256, 257)


def test_upstreams_gpt_dataset_reads_it(tmp_path, out):
    args = ("--stdlib", "--max-documents", 40, "--output-prefix", out / "d")
    code, _, stderr = forked(tmp_path, *args)
    assert code == 0, stderr
    tokenizer = build_encoder(BYTE_TRAINING_FLAGS[1], BYTE_TRAINING_FLAGS[2:])._tokenizer
    low_level = IndexedDataset(str(out / "d"))
    documents = np.arange(len(low_level), dtype=np.int32)
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=64, split="1,0,0", tokenizer=tokenizer,
        reset_position_ids=True, reset_attention_mask=False, eod_mask_loss=True,
        path_to_cache=str(tmp_path / "cache"),
    )  # fmt: skip
    dataset = GPTDataset(low_level, str(out / "d"), documents, 100, Split.train, config)
    stream = low_level.bin_reader.read(np.uint16, int(low_level.sequence_lengths.sum()), 0)
    text = ids_to_bytes(stream)
    sample = dataset[0]
    assert sample["tokens"].shape == (64,)
    assert all(0 <= int(t) <= BYTE_EOD for i in range(20) for t in dataset[i]["tokens"])
    inside = next(i for i in range(20) if BYTE_EOD not in dataset[i]["tokens"].tolist())
    assert ids_to_bytes(dataset[inside]["tokens"].numpy()) in text
    shutil.rmtree(tmp_path / "cache", ignore_errors=True)
