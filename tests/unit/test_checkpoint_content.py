"""Damage in real checkpoint files: every sort is found, named, and nothing foreign is executed.

The files are written by ``torch.distributed.checkpoint``, whose format Megatron's ``torch_dist``
is; tests/dist/test_checkpoint_verify.py does the same with Megatron's own writer.
"""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest

from megatron.resilience.checkpoint.metadata import StoredItem, read_items
from megatron.resilience.checkpoint.verify import Verification, divide, verify_checkpoint

pytestmark = pytest.mark.unit

SHARDS = ("__0_0.distcp", "__0_1.distcp")


def write(directory: Path, *, crc: bool = True) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp

    generator = torch.Generator().manual_seed(1)
    state = {
        "model.weight": torch.randn(64, 33, generator=generator),
        "model.half": torch.randn(500, generator=generator).bfloat16(),
        "model.flags": torch.randint(0, 255, (301,), generator=generator, dtype=torch.uint8),
        "optimizer.step": torch.tensor(7),
        "common_state/shard_0_1": {"iteration": 10, "words": ["a", "b"] * 20},
    }
    torch.serialization.set_crc32_options(crc)
    try:
        dcp.save(
            state,
            # torch's checksum switch is local to a thread: one thread where it is off.
            storage_writer=dcp.FileSystemWriter(directory, thread_count=2 if crc else 1),
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
            no_dist=True,
        )
    finally:
        torch.serialization.set_crc32_options(True)
    (directory / "metadata.json").write_text(
        json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
    )
    return directory


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    directory = write(tmp_path_factory.mktemp("checkpoint") / "iter_0000010")
    assert sorted(os.listdir(directory)) == sorted([*SHARDS, ".metadata", "metadata.json"])
    return directory


@pytest.fixture
def checkpoint(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / pristine.name)


def add_manifest(directory: Path) -> None:
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()
    }
    manifest = {"algorithm": "sha256", "files": files}
    (directory / "integrity.json").write_text(json.dumps(manifest))


def flip(path: Path, position: int, bit: int = 0) -> None:
    with path.open("r+b") as stream:
        stream.seek(position)
        byte = stream.read(1)[0]
        stream.seek(position)
        stream.write(bytes([byte ^ (1 << bit)]))


def only_line(result: Verification) -> str:
    (damage,) = result.damages
    assert "\n" not in str(damage)
    return str(damage)


def data_ranges(directory: Path) -> list[tuple[StoredItem, int, int]]:
    """(item, first byte, end) of the tensor data itself, found by its known bytes."""
    import torch

    ranges = []
    for item in read_items(directory):
        if item.least_data_bytes == 0:
            continue
        slab = (directory / item.file).read_bytes()[item.offset_bytes :][: item.length_bytes]
        tensor = torch.load(io.BytesIO(slab), weights_only=True)
        first = slab.index(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        first += item.offset_bytes
        ranges.append((item, first, first + item.least_data_bytes))
    return ranges


def test_sound_checkpoint(checkpoint):
    result = verify_checkpoint(checkpoint)
    assert result.damages == ()
    assert result.unchecked_bytes == 0
    assert result.checked_bytes > 64 * 33 * 4 + 500 * 2 + 301 + 8
    assert result.gb_per_s > 0
    assert verify_checkpoint(checkpoint, level="size").checked_bytes == 0


def test_any_flipped_bit_in_tensor_data_is_found_and_named(checkpoint):
    chooser = random.Random(2)
    for item, first, end in data_ranges(checkpoint):
        positions = {first, end - 1, *(chooser.randrange(first, end) for _ in range(40))}
        for position in positions:
            bit = chooser.randrange(8)
            flip(checkpoint / item.file, position, bit)
            line = only_line(verify_checkpoint(checkpoint))
            assert f"{checkpoint / item.file}: {item.label} does not match its checksum" in line
            flip(checkpoint / item.file, position, bit)
    assert verify_checkpoint(checkpoint).damages == ()


def test_flips_anywhere_in_a_shard_are_found_or_change_nothing(checkpoint):
    """Headers and padding hold redundant bytes: what is not found must load bit for bit equal."""
    import torch

    items = [item for item in read_items(checkpoint) if item.file == SHARDS[1]]
    path = checkpoint / SHARDS[1]
    content = path.read_bytes()

    def load(data: bytes) -> list[object]:
        slabs = (data[i.offset_bytes : i.offset_bytes + i.length_bytes] for i in items)
        return [torch.load(io.BytesIO(slab), weights_only=False) for slab in slabs]

    before = load(content)
    chooser = random.Random(3)
    found = tried = 0
    for position in chooser.sample(range(len(content)), 500):
        bit = chooser.randrange(8)
        flip(path, position, bit)
        tried += 1
        if verify_checkpoint(checkpoint).damages:
            found += 1
        else:
            for old, new in zip(before, load(path.read_bytes()), strict=True):
                same = torch.equal(old, new) if isinstance(old, torch.Tensor) else old == new
                assert same, f"bit {bit} of byte {position} changed {SHARDS[1]} unnoticed"
        flip(path, position, bit)
    assert found > tried / 2  # tiny tensors: most of this file is headers and padding


def test_objects_are_covered_too(checkpoint):
    (item,) = [item for item in read_items(checkpoint) if item.label.startswith("common_state")]
    content = (checkpoint / item.file).read_bytes()
    flip(checkpoint / item.file, content.index(b"iteration"))
    assert "common_state/shard_0_1 does not match" in only_line(verify_checkpoint(checkpoint))


@pytest.mark.parametrize("level", ["size", "full"])
def test_missing_shard(checkpoint, level):
    (checkpoint / SHARDS[1]).unlink()
    line = only_line(verify_checkpoint(checkpoint, level=level))
    assert line == f"{checkpoint / SHARDS[1]} is missing"


@pytest.mark.parametrize("level", ["size", "full"])
@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_truncated_shard(checkpoint, level, kept):
    path = checkpoint / SHARDS[0]
    whole_bytes = path.stat().st_size
    os.truncate(path, kept if kept >= 0 else whole_bytes + kept)
    line = only_line(verify_checkpoint(checkpoint, level=level))
    assert f"{SHARDS[0]} is truncated: {path.stat().st_size} bytes of at least" in line


def test_zeroed_block_is_found(checkpoint):
    path = checkpoint / SHARDS[0]
    path.write_bytes(bytes(path.stat().st_size))
    result = verify_checkpoint(checkpoint)
    assert {damage.file for damage in result.damages} == {SHARDS[0]}
    assert verify_checkpoint(checkpoint, level="size").damages == ()


def test_shard_of_another_checkpoint_with_smaller_tensors(checkpoint, tmp_path):
    """Two archives swapped inside a file: each one is sound, but they are not what was saved."""
    by_size = sorted(read_items(checkpoint), key=lambda item: item.least_data_bytes)
    small = next(item for item in by_size if item.least_data_bytes > 0)
    large = by_size[-1]
    slab = (checkpoint / small.file).read_bytes()[small.offset_bytes :][: small.length_bytes]
    with (checkpoint / large.file).open("r+b") as stream:
        # The zip index is found from the end, so the small archive sits at the end of the slot.
        stream.seek(large.offset_bytes + large.length_bytes - small.length_bytes)
        stream.write(slab)
    assert large.label in only_line(verify_checkpoint(checkpoint))


@pytest.mark.parametrize("kept", [0, 1, 20, 500, -1])
def test_torn_metadata(checkpoint, kept):
    path = checkpoint / ".metadata"
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    for level in ("size", "full"):
        line = only_line(verify_checkpoint(checkpoint, level=level))
        assert f"{path} is " in line


@pytest.mark.parametrize("content", ["", "{", "[]", "null", '{"sharded_backend": "zarr"}', "\0"])
def test_torn_config(checkpoint, content):
    (checkpoint / "metadata.json").write_text(content)
    assert "metadata.json" in only_line(verify_checkpoint(checkpoint, level="size"))


@pytest.mark.parametrize("file", [".metadata", "metadata.json"])
@pytest.mark.parametrize("level", ["off", "size", "full"])
def test_unfinished_save(checkpoint, file, level):
    (checkpoint / file).unlink()
    line = only_line(verify_checkpoint(checkpoint, level=level))
    assert f"{checkpoint / file} is missing" in line


def test_common_file_of_older_checkpoints(checkpoint):
    import torch

    path = checkpoint / "common.pt"
    torch.save({"args": list(range(100)), "iteration": 10}, path)
    assert verify_checkpoint(checkpoint).damages == ()
    flip(path, path.read_bytes().index(b"iteration"))
    assert "common.pt: common state does not match" in only_line(verify_checkpoint(checkpoint))
    os.truncate(path, path.stat().st_size // 2)
    assert "common.pt: common state is damaged" in only_line(verify_checkpoint(checkpoint))
    os.truncate(path, 0)
    assert "common.pt is empty" in only_line(verify_checkpoint(checkpoint, level="size"))


def test_common_file_is_required_where_nothing_else_holds_the_common_state(tmp_path):
    import torch
    import torch.distributed.checkpoint as dcp

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    assert "common.pt is missing" in only_line(verify_checkpoint(tmp_path))


def test_checkpoint_saved_without_checksums_is_not_called_damaged(tmp_path):
    directory = write(tmp_path / "iter_0000010", crc=False)
    result = verify_checkpoint(directory)
    assert result.damages == ()
    assert result.checked_bytes == 0
    assert result.unchecked_bytes > 64 * 33 * 4


def test_manifest_covers_every_byte_of_the_small_files(checkpoint):
    add_manifest(checkpoint)
    assert verify_checkpoint(checkpoint).damages == ()
    for file in (".metadata", "metadata.json"):
        size_bytes = (checkpoint / file).stat().st_size
        for position in random.Random(4).sample(range(size_bytes), min(50, size_bytes)):
            flip(checkpoint / file, position)
            result = verify_checkpoint(checkpoint)
            assert any(
                damage.file == file and "SHA-256" in damage.problem for damage in result.damages
            )
            flip(checkpoint / file, position)


def test_flipped_metadata_never_harms_the_reader(checkpoint):
    """Every byte of ``.metadata`` is flipped: always an answer, in bounded memory and time."""
    import resource

    path = checkpoint / ".metadata"
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = 0
    size_bytes = path.stat().st_size
    for position in range(size_bytes):
        flip(path, position, position % 8)
        found += bool(verify_checkpoint(checkpoint, level="size").damages)
        flip(path, position, position % 8)
    assert found > size_bytes / 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 100_000


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def test_malicious_metadata_is_refused_and_not_executed(checkpoint, tmp_path):
    victim = tmp_path / "executed"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (checkpoint / ".metadata").write_bytes(pickle.dumps(_Touch(victim), protocol=protocol))
        line = only_line(verify_checkpoint(checkpoint))
        assert "refused" in line
    # A global that is allowed, with a nested name that leads elsewhere.
    nested = b"\x80\x04\x8c\x05torch\x8c\x0dos.system.foo\x93."
    (checkpoint / ".metadata").write_bytes(nested)
    assert "refused" in only_line(verify_checkpoint(checkpoint))
    assert not victim.exists()


def test_file_names_in_metadata_cannot_leave_the_directory(checkpoint):
    path = checkpoint / ".metadata"
    content = path.read_bytes()
    path.write_bytes(content.replace(SHARDS[0].encode(), b"../../passwd"))
    assert "not a file beside it" in only_line(verify_checkpoint(checkpoint))


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_parts_cover_everything_once(checkpoint, of):
    items = read_items(checkpoint)
    parts = [divide(items, index, of) for index in range(of)]
    assert [item for part in parts for item in part] == list(items)
    whole = verify_checkpoint(checkpoint)
    split = [verify_checkpoint(checkpoint, part=(index, of)) for index in range(of)]
    assert sum(part.checked_bytes for part in split) == whole.checked_bytes
    item, first, _ = data_ranges(checkpoint)[0]
    flip(checkpoint / item.file, first)
    split = [verify_checkpoint(checkpoint, part=(index, of)) for index in range(of)]
    assert [len(part.damages) for part in split].count(1) == 1


def test_parts_are_even_to_one_item():
    chooser = random.Random(5)
    items = [
        StoredItem(
            file="f",
            offset_bytes=0,
            length_bytes=chooser.randrange(1, 1000),
            label=str(number),
            least_data_bytes=0,
            transformed=False,
        )
        for number in range(500)
    ]
    sizes = [sum(item.length_bytes for item in divide(items, index, 8)) for index in range(8)]
    assert max(sizes) - min(sizes) <= 2 * 1000


def test_part_must_be_an_index(checkpoint):
    with pytest.raises(ValueError, match="part"):
        verify_checkpoint(checkpoint, part=(2, 2))


def test_checking_imports_neither_torch_nor_megatron_core(pristine):
    import subprocess
    import sys

    program = (
        "import sys; from pathlib import Path\n"
        "from megatron.resilience.checkpoint.verify import verify_checkpoint\n"
        "assert verify_checkpoint(Path(sys.argv[1])).damages == ()\n"
        "from megatron.resilience.checkpoint import agree, config\n"
        "assert not {'torch', 'megatron.core', 'megatron.training'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program, pristine], check=True, timeout=60)
