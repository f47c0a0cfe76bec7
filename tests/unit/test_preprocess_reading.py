"""Reading for the preprocessor: damage is told apart, order depends on the sources alone."""

import gzip
import json
import os

import pytest
import zstandard

from megatron.resilience.data.preprocess.chunks import CHUNK_BYTES, plan_chunks
from megatron.resilience.data.preprocess.config import InputFormat, PreprocessConfig
from megatron.resilience.data.preprocess.records import (
    BadInput,
    BadKind,
    BadRecord,
    FileBatch,
    LineBlock,
)
from megatron.resilience.data.preprocess.sources import (
    SourceFile,
    Sources,
    discover,
    form_of,
    stdlib_root,
)
from megatron.resilience.data.preprocess.streams import InputReader, SourceError, read_whole
from resihp_ext.errors import UserError

pytestmark = pytest.mark.unit

LINES = [f"line {i} {'x' * (i % 97)}" for i in range(60_000)]
TEXT = ("\n".join(LINES) + "\n").encode()


def lines_of(chunks):
    """Return (line number, line) of all LineBlocks, checking that the numbers are contiguous."""
    found = []
    for chunk in chunks:
        if isinstance(chunk, LineBlock):
            pieces = chunk.data.split(b"\n")
            if not pieces[-1]:
                pieces.pop()
            found.extend(enumerate(pieces, start=chunk.first_line))
    return found


def chunks_of(path, *, form=InputFormat.LINES, max_document_bytes=10**9):
    source = SourceFile(path=str(path), form=form, size_bytes=os.path.getsize(path))
    return list(plan_chunks(Sources(entries=(source,)), max_document_bytes=max_document_bytes))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_whole_content_survives_each_compression(tmp_path, suffix):
    path = tmp_path / f"a.txt{suffix}"
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix]
    path.write_bytes(pack(TEXT))
    assert read_whole(str(path), max_bytes=len(TEXT)) == TEXT


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_several_frames_are_one_file(tmp_path, suffix, pack):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(pack(b"one ") + pack(b"") + pack(b"two"))
    assert read_whole(str(path), max_bytes=100) == b"one two"


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstandard.compress)])
def test_truncation_is_noticed_after_what_came_before(tmp_path, suffix, pack):
    path = tmp_path / f"a{suffix}"
    packed = pack(os.urandom(400_000) + TEXT)
    path.write_bytes(packed[: len(packed) * 3 // 4])
    got = bytearray()

    def read_all():
        while piece := reader.read_some():
            got.extend(piece)

    with InputReader(str(path)) as reader, pytest.raises(SourceError) as caught:
        read_all()
    assert caught.value.kind is BadKind.TRUNCATED
    assert len(got) > 200_000


def test_damage_inside_is_corrupt_not_truncated(tmp_path):
    packed = bytearray(gzip.compress(TEXT))
    packed[-8] ^= 0xFF  # the checksum
    path = tmp_path / "a.gz"
    path.write_bytes(packed)
    with pytest.raises(SourceError) as caught:
        read_whole(str(path), max_bytes=10**9)
    assert caught.value.kind is BadKind.CORRUPT
    path = tmp_path / "a.zst"
    path.write_bytes(b"this is not zstd at all")
    with pytest.raises(SourceError) as caught:
        read_whole(str(path), max_bytes=10**9)
    assert caught.value.kind is BadKind.CORRUPT


def test_a_bomb_stops_at_the_limit(tmp_path):
    path = tmp_path / "bomb.zst"
    path.write_bytes(zstandard.compress(bytes(300_000_000)))
    with pytest.raises(SourceError) as caught:
        read_whole(str(path), max_bytes=1_000_000)
    assert caught.value.kind is BadKind.TOO_LARGE


@pytest.mark.parametrize("ending", [b"\n", b""])
def test_lines_are_never_split_and_keep_their_numbers(tmp_path, ending):
    path = tmp_path / "a.txt"
    path.write_bytes(TEXT.removesuffix(b"\n") + ending)
    chunks = chunks_of(path)
    assert len(chunks) > 1
    assert all(len(chunk.data) < 2 * CHUNK_BYTES for chunk in chunks)
    assert lines_of(chunks) == [(i, line.encode()) for i, line in enumerate(LINES, start=1)]
    assert [chunk.starts_file for chunk in chunks] == [True] + [False] * (len(chunks) - 1)
    assert sum(chunk.source_bytes for chunk in chunks) == path.stat().st_size


def test_an_overlong_line_is_named_and_skipped_without_holding_it(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\n" + b"y" * 3_000_000 + b"\nthird\n")
    chunks = chunks_of(path, max_document_bytes=600_000)
    assert lines_of(chunks) == [(1, b"first"), (3, b"third")]
    (bad,) = [chunk.record for chunk in chunks if isinstance(chunk, BadInput)]
    assert (bad.kind, bad.line) == (BadKind.TOO_LARGE, 2)


def test_a_truncated_file_of_lines_gives_its_whole_lines_then_names_the_place(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    packed = gzip.compress(TEXT)
    path.write_bytes(packed[: len(packed) // 2])
    chunks = chunks_of(path, form=InputFormat.JSONL)
    got = lines_of(chunks)
    assert 1000 < len(got) < len(LINES)
    assert [line for _, line in got] == [line.encode() for line in LINES[: len(got)]]
    assert isinstance(chunks[-1], BadInput)
    assert chunks[-1].record.kind is BadKind.TRUNCATED
    assert chunks[-1].record.line == len(got) + 1


def test_files_are_batched_in_order_around_files_of_lines(tmp_path):
    for name in ("a.txt", "b.txt", "c.jsonl", "d.txt"):
        (tmp_path / name).write_text(json.dumps({"text": name}) + "\n")
    sources = discover(PreprocessConfig(output_prefix="p", inputs=(str(tmp_path),)))
    first, lines, last = plan_chunks(sources, max_document_bytes=10**6)
    assert [os.path.basename(p) for p in first.paths] == ["a.txt", "b.txt"]
    assert isinstance(lines, LineBlock)
    assert isinstance(last, FileBatch)


def test_a_tree_is_sorted_filtered_and_free_of_hidden_files(tmp_path):
    for name in ("b/z.py", "b/a.py", "a.py", ".git/x.py", "b/.y.py", "pic.png", "b.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")

    def found(**options):
        config = PreprocessConfig(output_prefix="p", inputs=(str(tmp_path),), **options)
        return [os.path.relpath(e.path, tmp_path) for e in discover(config).entries]

    assert found() == ["a.py", "b.md", "b/a.py", "b/z.py"]
    assert found(globs=("*.png",)) == ["pic.png"]
    assert found(globs=("b/*.py",)) == ["b/a.py", "b/z.py"]


def test_dangling_links_and_pipes_in_a_tree_are_unreadable_not_fatal_and_never_opened(tmp_path):
    (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe.py")
    sources = discover(PreprocessConfig(output_prefix="p", inputs=(str(tmp_path),)))
    assert all(isinstance(entry, BadRecord) for entry in sources.entries)
    assert {entry.kind for entry in sources.entries} == {BadKind.UNREADABLE}


def test_an_input_that_does_not_exist_is_the_users_error(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        discover(PreprocessConfig(output_prefix="p", inputs=(str(tmp_path / "nowhere"),)))


def test_the_standard_library_is_found_without_foreign_packages():
    sources = discover(PreprocessConfig(output_prefix="p", stdlib=True))
    paths = [entry.path for entry in sources.entries]
    assert os.path.join(stdlib_root(), "json", "__init__.py") in paths
    assert paths == sorted(paths)
    assert not [p for p in paths if "site-packages" in p or not p.endswith(".py")]
    assert sources.total_bytes > 5_000_000


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("a.jsonl", InputFormat.JSONL),
        ("a.JSONL.gz", InputFormat.JSONL),
        ("a.ndjson.zst", InputFormat.JSONL),
        ("a.txt.gz", InputFormat.TEXT),
        ("a.py", InputFormat.TEXT),
    ],
)
def test_the_name_chooses_the_format_unless_told(name, form):
    assert form_of(name, InputFormat.AUTO) is form
    assert form_of(name, InputFormat.LINES) is InputFormat.LINES


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "nothing to read"),
        ({"stdlib": True, "workers": 0}, "--workers"),
        ({"stdlib": True, "max_bad_fraction": 1.5}, "--max-bad-fraction"),
        ({"stdlib": True, "max_documents": 0}, "--max-documents"),
        ({"stdlib": True, "limit_bytes": -1}, "--limit-mb"),
        ({"stdlib": True, "max_document_bytes": 2**31}, "--max-document-mb"),
        ({"stdlib": True, "output_prefix": "data/"}, "--output-prefix"),
    ],
)
def test_an_inconsistent_configuration_names_its_flag(options, named):
    with pytest.raises(UserError, match=named):
        PreprocessConfig(**{"output_prefix": "p", **options})
