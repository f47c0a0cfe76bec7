"""The preprocessor as users meet it: what it writes, and what it says to wrong use."""

import gzip
import os
from pathlib import Path

import pytest
import zstandard
from preprocessing import command, digests, forked, jsonl, one_line, summary_of, texts_of

from megatron.resilience.data.preprocess.sources import stdlib_root

pytestmark = pytest.mark.dist


def test_every_kind_of_source_reads_back_exactly(tmp_path, out):
    shards = [[f"shard {s}, text {i} é🙂\n" * (i % 40 + 1) for i in range(300)] for s in range(4)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(shards[0]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(shards[1])))
    (tmp_path / "c.jsonl.zst").write_bytes(zstandard.compress(jsonl(shards[2])))
    (tmp_path / "d.txt").write_text(shards[3][0])
    (tmp_path / "e.txt.gz").write_bytes(gzip.compress(shards[3][1].encode()))
    tree = tmp_path / "tree"
    for name in ("src/b.py", "src/a.c", "README.md"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(f"content of {name}")
    (tree / "src/broken.py").write_bytes(b"caf\xe9")
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(b'{"text": "kept"}\n{"text": "cut\n{"body": "x"}\n{"text": ""}\n')
    names = ("a.jsonl", "b.jsonl.gz", "c.jsonl.zst", "d.txt", "e.txt.gz", "tree", "bad.jsonl")
    inputs = [arg for name in names for arg in ("--input", tmp_path / name)]
    run = command(*inputs, "--output-prefix", out / "d", "--workers", 2, "--json")
    assert run.returncode == 0, run.stderr
    expected = [t.encode() for shard in shards[:3] for t in shard]
    expected += [shards[3][0].encode(), shards[3][1].encode()]
    expected += [f"content of {name}".encode() for name in ("README.md", "src/a.c", "src/b.py")]
    expected += [b"kept"]
    assert texts_of(out / "d") == expected
    assert sorted(os.listdir(out)) == ["d.bin", "d.idx"]
    summary = summary_of(run.stdout)
    assert summary["documents"] == len(expected)
    assert summary["bytes"] == sum(map(len, expected))
    assert summary["tokens"] == summary["bytes"] + len(expected)
    assert summary["length_tokens"]["max"] == max(map(len, expected)) + 1
    assert summary["bad"] == {"bad_utf8": 1, "empty": 1, "malformed_json": 1, "missing_key": 1}
    named = " ".join(summary["bad_examples"])
    for place in (f"{tree}/src/broken.py: bad", f"{bad}:2: mal", f"{bad}:3: mis", f"{bad}:4: emp"):
        assert place in named
        assert place in run.stdout
    assert "Traceback" not in run.stderr
    assert "Warning" not in run.stderr


@pytest.mark.parametrize("form", ["auto", "python"])
def test_output_does_not_depend_on_the_number_of_workers(tmp_path, out, form):
    found = []
    for workers in (1, 2, 3):
        prefix = out / f"w{workers}"
        args = ("--stdlib", "--format", form, "--limit-mb", 9, "--output-prefix", prefix)
        code, stdout, stderr = forked(tmp_path, *args, "--workers", workers, "--json")
        assert code == 0, stderr
        found.append((digests(prefix), summary_of(stdout)["bad"]))
    assert found[0] == found[1] == found[2]
    assert 8e6 < summary_of(stdout)["bytes"] <= 9e6


def test_the_standard_library_equals_its_sources(tmp_path, out):
    code, stdout, stderr = forked(tmp_path, "--stdlib", "--output-prefix", out / "d", "--json")
    assert code == 0, stderr
    root = Path(stdlib_root())
    foreign = {"site-packages", "dist-packages", "__pycache__"}
    paths = [p for p in root.rglob("*.py") if not foreign & set(p.relative_to(root).parts)]
    expected = []
    for path in sorted(map(str, paths)):
        data = Path(path).read_bytes()
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
        if text.strip():
            expected.append(text.encode())
    assert texts_of(out / "d") == expected
    # Measured 1.4 s on two shared cores; the limit only catches a loss of the fast path.
    assert summary_of(stdout)["seconds"] < 30


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["nothing to read"]),
        (["--input", "/nowhere/x.txt"], ["/nowhere/x.txt", "No such file"]),
        (["--stdlib", "--wokers", "2"], ["--wokers"]),
        (["--stdlib", "stray.txt"], ["stray.txt", "--input"]),
        (["--stdlib", "--workers", "many"], ["--workers", "many"]),
        (["--stdlib", "--format", "csv"], ["--format", "csv"]),
        (["--stdlib", "--workers", "0"], ["--workers 0"]),
        (["--input", "EMPTY"], ["no documents", "0 files"]),
        (["--input", "BAD", "--on-bad-input", "fail"], ["bad.jsonl:1: malformed_json"]),
        (["--input", "BAD"], ["no documents", "bad.jsonl:1"]),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(tmp_path, out, args, words):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").write_text("{\n")
    places = {"EMPTY": tmp_path / "empty", "BAD": tmp_path / "bad.jsonl"}
    run = command(*(places.get(arg, arg) for arg in args), "--output-prefix", out / "d")
    assert run.returncode == 2, run.stderr
    one_line(run.stderr, *words)
    assert not os.listdir(out)


def test_existing_data_is_kept_unless_told_and_replaced_only_when_complete(tmp_path, out):
    corpus = tmp_path / "a.txt"
    corpus.write_text("new")
    for end in (".bin", ".idx"):
        (out / f"d{end}").write_text("old")
    args = ("--input", corpus, "--output-prefix", out / "d")
    code, _, stderr = forked(tmp_path, *args)
    assert code == 2
    one_line(stderr, "d.bin exists", "--overwrite")
    broken = tmp_path / "b.jsonl"
    broken.write_text("{\n")
    code, _, stderr = forked(tmp_path, *args, "--input", broken, "--overwrite")
    assert code == 2
    one_line(stderr, "1 of 2 documents are bad", "b.jsonl:1")
    assert (out / "d.bin").read_text() == (out / "d.idx").read_text() == "old"
    code, _, stderr = forked(tmp_path, *args, "--overwrite")
    assert code == 0, stderr
    assert texts_of(out / "d") == [b"new"]
    assert sorted(os.listdir(out)) == ["d.bin", "d.idx"]


def test_a_truncated_shard_refuses_the_dataset_unless_allowed(tmp_path, out):
    texts = [os.urandom(50).hex() for _ in range(5000)]
    packed = gzip.compress(jsonl(texts))
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    args = ("--input", tmp_path / "a.jsonl.gz", "--output-prefix", out / "d")
    code, _, stderr = forked(tmp_path, *args)
    assert code == 2
    one_line(stderr, "1 of 1 files are bad", "1 truncated", "a.jsonl.gz:2")
    assert not os.listdir(out)
    code, stdout, stderr = forked(tmp_path, *args, "--max-bad-fraction", 1, "--json")
    assert code == 0, stderr
    got = texts_of(out / "d")
    assert 2000 < len(got) < 3000
    assert got == [t.encode() for t in texts[: len(got)]]
    assert summary_of(stdout)["bad"] == {"truncated": 1}
