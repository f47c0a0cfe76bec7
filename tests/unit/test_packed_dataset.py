"""Packed samples of real datasets on disk: their content, their order, their cache."""

import itertools
import logging
import os
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.utils import flatten_batch_for_packed_sequences

from megatron.resilience.data.byte_tokenizer import ByteTokenizer
from megatron.resilience.data.config import DataConfig
from megatron.resilience.data.packed_dataset import PackedDataset
from megatron.resilience.data.samples import SampleSource, micro_batch_number, sample_numbers
from megatron.resilience.testing.corpus import write_corpus
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit

CAPACITY = 64
STRIDE = 1000
"""Token ``d * STRIDE + p`` is token ``p`` of document ``d``: every token says where it is from."""


def write(prefix: Path, lengths: list[int]) -> Path:
    """Writes documents of the given lengths whose tokens tell document and place."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for number, length in enumerate(lengths):
        builder.add_item(torch.arange(length, dtype=torch.int64) + number * STRIDE)
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


def dataset(
    prefix: Path,
    *,
    seed: int = 1,
    samples: int | None = None,
    cache: Path | None = None,
    documents: slice = slice(None),
    capacity: int = CAPACITY,
) -> PackedDataset:
    config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=capacity,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=ByteTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        path_to_cache=None if cache is None else str(cache),
    )
    low = PackedDataset.build_low_level_dataset(str(prefix), config)
    indices = np.arange(PackedDataset.numel_low_level_dataset(low), dtype=np.int32)[documents]
    return PackedDataset(low, str(prefix), indices, samples, Split.train, config)


def some_lengths(seed: int = 0, documents: int = 120) -> list[int]:
    """Short and long documents, some of one token or none, some longer than a sequence."""
    chosen = random.Random(seed)
    common = [int(chosen.lognormvariate(3.2, 0.9)) for _ in range(documents)]
    return [*common, 0, 1, 2, CAPACITY, CAPACITY + 1, CAPACITY + 2, 5 * CAPACITY]


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("data") / "tagged", some_lengths())


def segments(sample: dict[str, torch.Tensor]) -> list[tuple[int, int]]:
    """Start and stop of each segment of a sample, from its boundaries."""
    edges = sorted(set(sample["cu_seqlens"].tolist()))
    return list(itertools.pairwise(edges))


def samples(packed: PackedDataset) -> list[dict[str, torch.Tensor]]:
    return [packed[k] for k in range(len(packed))]


def same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == two.keys()
    return all(torch.equal(one[key], two[key]) for key in one)


def test_labels_follow_their_tokens_inside_one_document(tagged):
    for sample in samples(packed := dataset(tagged)):
        here = sample["loss_mask"].bool()
        assert torch.equal(sample["labels"][here], sample["tokens"][here] + 1)
        assert torch.equal(sample["labels"][here] // STRIDE, sample["tokens"][here] // STRIDE)
    assert len(packed) == packed.packing.sequences > 20


def test_boundaries_lie_where_the_tokens_change_document(tagged):
    for sample in samples(dataset(tagged)):
        filled = int(sample["loss_mask"].sum())
        for start, stop in segments(sample):
            place = torch.arange(stop - start)
            assert torch.equal(sample["position_ids"][start:stop], place)
            if start < filled:
                assert torch.equal(sample["tokens"][start:stop], sample["tokens"][start] + place)
        assert sample["max_seqlen"] == max(stop - start for start, stop in segments(sample))


def test_padding_is_a_segment_of_its_own_and_has_no_loss(tagged):
    padded = 0
    for sample in samples(dataset(tagged)):
        filled = int(sample["loss_mask"].sum())
        assert sample["loss_mask"][:filled].all()
        if filled < CAPACITY:
            padded += 1
            assert segments(sample)[-1] == (filled, CAPACITY)
            assert (sample["tokens"][filled:] == ByteTokenizer.eod).all()
    assert padded, "this corpus leaves padding somewhere"


def test_shapes_and_types_are_those_that_upstream_expects(tagged):
    sample = dataset(tagged)[0]
    for name in ("tokens", "labels", "position_ids"):
        assert (sample[name].shape, sample[name].dtype) == ((CAPACITY,), torch.int64)
    assert (sample["loss_mask"].shape, sample["loss_mask"].dtype) == ((CAPACITY,), torch.float32)
    assert (sample["cu_seqlens"].shape, sample["cu_seqlens"].dtype) == (
        (CAPACITY + 1,),
        torch.int32,
    )


def trained_on(packed: PackedDataset, numbers: range) -> Counter[int]:
    """How often each token was predicted."""
    counts: Counter[int] = Counter()
    for number in numbers:
        sample = packed[number]
        counts.update(sample["labels"][sample["loss_mask"].bool()].tolist())
    return counts


def test_every_token_but_the_first_of_a_document_is_predicted_once_an_epoch(tagged):
    packed = dataset(tagged, samples=10_000)
    epoch = packed.packing.sequences
    expected = Counter(
        number * STRIDE + place
        for number, length in enumerate(some_lengths())
        for place in range(1, length)
    )
    for first in (0, epoch, 7 * epoch):
        assert trained_on(packed, range(first, first + epoch)) == expected


def test_documents_of_another_split_stay_out(tagged):
    packed = dataset(tagged, documents=slice(30, 50))
    seen = {token // STRIDE for token in trained_on(packed, range(len(packed)))}
    assert seen == {n for n, length in enumerate(some_lengths()) if 30 <= n < 50 and length > 1}


def test_a_sample_depends_on_seed_and_number_alone(tagged, tmp_path):
    numbers = [0, 3, 1, 70, 0, 69, 140, 1]
    one = dataset(tagged, samples=500)
    forwards = [one[k] for k in numbers]
    two = dataset(tagged, samples=9000, cache=tmp_path)
    backwards = [two[k] for k in reversed(numbers)][::-1]
    assert all(same(a, b) for a, b in zip(forwards, backwards, strict=True))
    assert not same(forwards[0], dataset(tagged, seed=2, samples=500)[0])


def test_epochs_differ_in_order_and_so_do_seeds(tagged):
    packed = dataset(tagged, samples=10_000)
    epoch = packed.packing.sequences

    def order(source: PackedDataset, which: int) -> list[bytes]:
        numbers = range(which * epoch, (which + 1) * epoch)
        return [source[k]["tokens"].numpy().tobytes() for k in numbers]

    orders = [order(packed, which) for which in range(3)]
    orders.append(order(dataset(tagged, seed=2, samples=10_000), 0))
    assert len({tuple(one) for one in orders}) == 4
    assert len({tuple(sorted(one)) for one in orders}) == 1


def test_filler_sample_has_no_loss(tagged):
    filler = dataset(tagged)[None]
    assert not filler["loss_mask"].any()
    assert segments(filler)[-1][1] == CAPACITY


@pytest.mark.parametrize("number", [-1, 40])
def test_there_is_no_sample_outside_the_data_set(tagged, number):
    with pytest.raises(IndexError, match=f"sample {number} of 40"):
        dataset(tagged, samples=40)[number]


def test_text_is_read_back_from_a_real_corpus(tmp_path):
    """Documents of a corpus, put together again from its samples, are the documents written."""
    packed = dataset(write_corpus(tmp_path / "text", documents=60), capacity=512)
    written = {packed.dataset[k].tobytes() for k in range(len(packed.dataset))}
    pieces: set[bytes] = set()
    for sample in samples(packed):
        filled = int(sample["loss_mask"].sum())
        for start, stop in segments(sample):
            if start < filled:
                text = [*sample["tokens"][start:stop].tolist(), int(sample["labels"][stop - 1])]
                pieces.add(np.array(text, dtype=packed.dataset[0].dtype).tobytes())
    short = {text for text in written if len(text) // 2 - 1 <= 512}
    assert short
    assert short <= pieces


def test_micro_batches_by_address_and_their_boundaries(tagged):
    """Upstream joins the samples of a micro-batch; every segment survives in its place."""
    packed = dataset(tagged, samples=500)
    source = SampleSource(dataset=packed, micro_batch_size=3)
    batch = source.micro_batch(120, micro_batch_number(1, 2, 4))
    numbers = sample_numbers(120, 9, 3)
    assert numbers == range(147, 150)
    for row, number in enumerate(numbers):
        assert same({key: value[row] for key, value in batch.items()}, packed[number])
    flat = flatten_batch_for_packed_sequences(dict(batch))
    lengths = [stop - start for k in numbers for start, stop in segments(packed[k])]
    assert flat["cu_seqlens"][0].diff().tolist() == lengths
    assert flat["max_seqlen"].item() == max(lengths)
    with pytest.raises(IndexError):
        source.micro_batch(500, 0)


def test_iteration_ends_with_the_data_set(tagged):
    packed = dataset(tagged, samples=7)
    assert len(list(itertools.islice(packed, 9))) == 7


def test_micro_batches_of_a_step_are_disjoint_whatever_the_number_of_replicas():
    for replicas in (1, 2, 3, 4, 6, 12):
        numbers = [micro_batch_number(r, t, replicas) for t in range(12 // replicas)
                   for r in range(replicas)]  # fmt: skip
        assert numbers == list(range(12))


def test_a_split_without_two_tokens_in_a_document_is_refused(tmp_path):
    prefix = write(tmp_path / "short", [1, 0, 1])
    with pytest.raises(UserError, match=f"{prefix}: the train split has no document of two tokens"):
        dataset(prefix)


def test_packing_is_off_unless_asked_for():
    assert DataConfig() == DataConfig(packed_sequences=False)


# The cache: an aid that must never change the data nor end the job.


def cached(folder: Path) -> Path:
    (path,) = folder.glob("*.npz")
    return path


def all_same(one: PackedDataset, two: PackedDataset) -> bool:
    return all(same(a, b) for a, b in zip(samples(one), samples(two), strict=True))


def test_cache_is_written_once_and_read_afterwards(tagged, tmp_path):
    cold = dataset(tagged, cache=tmp_path)
    stamp = cached(tmp_path).stat().st_mtime_ns
    warm = dataset(tagged, cache=tmp_path)
    assert cached(tmp_path).stat().st_mtime_ns == stamp
    assert all_same(cold, warm)
    assert [path.suffix for path in tmp_path.iterdir()] == [".npz"], "no temporary file is left"
    # What is read really is the file: another packing under this name shows in the samples.
    other = dict(np.load(cached(tmp_path)))
    starts = np.array([*range(len(other["lengths"]) + 1)])
    np.savez(cached(tmp_path), **(other | {"starts": starts}))
    assert dataset(tagged, cache=tmp_path).packing.sequences == len(other["lengths"])


def test_default_cache_lies_beside_the_data(tmp_path):
    dataset(write(tmp_path / "d", [9, 8]))
    assert cached(tmp_path / "cache" / "packed").is_file()


@pytest.mark.parametrize("damage", ["empty", "half", "garbage", "flipped", "missing array"])
def test_damaged_cache_is_replaced(tagged, tmp_path, caplog, damage):
    expected = dataset(tagged, cache=tmp_path)
    path = cached(tmp_path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    if damage == "missing array":
        np.savez(path, documents=np.arange(3))
    else:
        path.write_bytes(
            {
                "empty": b"",
                "half": whole[:middle],
                "garbage": b"no archive at all" * 50,
                "flipped": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
            }[damage]
        )
    with caplog.at_level(logging.WARNING):
        assert all_same(dataset(tagged, cache=tmp_path), expected)
    assert str(path) in caplog.text
    assert path.read_bytes() == whole


def test_folder_that_cannot_be_written_costs_only_the_cache(tagged, tmp_path, caplog):
    """A file where the folder should be stops root too, unlike permissions."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        packed = dataset(tagged, cache=blocked / "below")
    assert all_same(packed, dataset(tagged, cache=tmp_path / "fine"))
    assert f"not cached in {blocked}" in caplog.text


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes into read-only folders")
def test_read_only_folder_costs_only_the_cache(tagged, tmp_path):
    tmp_path.chmod(0o555)
    assert len(dataset(tagged, cache=tmp_path)) > 0
    assert not list(tmp_path.iterdir())


def test_data_replaced_by_other_data_of_equal_size_and_time_is_packed_anew(tmp_path):
    """``rsync --times`` and archives set times back; the cache must not believe them."""
    prefix = write(tmp_path / "d", [10, 20, 30, 40])
    times = os.stat(f"{prefix}.idx")
    dataset(prefix)
    write(prefix, [40, 20, 30, 10])
    os.utime(f"{prefix}.idx", ns=(times.st_atime_ns, times.st_mtime_ns))
    again = dataset(prefix)
    assert trained_on(again, range(len(again))) == Counter(
        n * STRIDE + place for n, size in enumerate([40, 20, 30, 10]) for place in range(1, size)
    )


def test_sequence_length_and_split_have_their_own_cache(tagged, tmp_path):
    for documents, capacity in [(slice(None), 64), (slice(None), 32), (slice(40), 64)]:
        packed = dataset(tagged, cache=tmp_path, documents=documents, capacity=capacity)
        assert packed.packing.capacity == capacity
    assert len(list(tmp_path.glob("*.npz"))) == 3
